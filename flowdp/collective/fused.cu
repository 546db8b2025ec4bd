// Kernels of the mean: one pass that reads every replica once and writes it once. Compiled for a number of
// members (-D MEMBERS=...), by NVRTC for a card and, in the tests, by a C++ compiler for the CPU.

typedef unsigned long long Address;

struct Mean {                // one argument for all, laid out as `MEAN` in fused.py
    Address sources[8];      // memory of each member
    Address targets[8];      // memory for the mean; may be the sources
    Address bad[8];          // flag of each member, a byte; 0: there is none
    double weights[8];       // 0: the member gives nothing and is not read
    Address rows;            // double[blocks][MEMBERS + 1]: sums of squares of each block; 0: not measured
    Address count;           // elements
    Address written;         // number of targets
};

struct Half { unsigned short bits; };
struct Bfloat16 { unsigned short bits; };

union Word { unsigned bits; float value; };

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(Bfloat16 value) {
    Word word;
    word.bits = (unsigned)value.bits << 16;
    return word.value;
}

__device__ inline void narrow(float value, float& out) { out = value; }
__device__ inline void narrow(double value, double& out) { out = value; }
__device__ inline void narrow(float value, Bfloat16& out) {
    Word word;
    word.value = value;
    // To the nearest, of two the even one; a NaN, which the sum would carry over to an infinity, stays one.
    out.bits = value != value ? 0x7fff : (word.bits + 0x7fff + (word.bits >> 16 & 1)) >> 16;
}

#ifdef __CUDACC__
__device__ inline float widen(Half value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}
__device__ inline void narrow(float value, Half& out) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
#else
union HalfWord { unsigned short bits; _Float16 value; };
inline float widen(Half value) {
    HalfWord word;
    word.bits = value.bits;
    return word.value;
}
inline void narrow(float value, Half& out) {
    HalfWord word;
    word.value = value;
    out.bits = word.bits;
}
#endif

// As torch.lerp: near either end it keeps the digits of that end, and equal numbers stay equal to the bit.
template <typename Wide>
__device__ inline Wide towards(Wide from, Wide to, Wide step) {
    return step < Wide(0.5) ? from + step * (to - from) : to - (to - from) * (Wide(1) - step);
}

template <typename Element, int LENGTH>
struct alignas(sizeof(Element) * LENGTH) Vector {
    Element values[LENGTH];
};

// The mean of vectors first, first + stride, ...; adds squares of distances, and of the mean.
template <typename Element, typename Wide, int LENGTH, int AT_ONCE>
__device__ inline void mean_of_vectors(
    const Mean& mean, const Wide* steps, Address offset, Address vectors, bool measures, double* squares
) {
    typedef Vector<Element, LENGTH> Row;
    const Address stride = (Address)gridDim.x * blockDim.x;
    const Address first = (Address)blockIdx.x * blockDim.x + threadIdx.x;
    for (Address at = first; at < vectors; at += AT_ONCE * stride) {
        Row rows[AT_ONCE][MEMBERS];
        // All loads first: the memory answers late, and many of them wait for it together.
#pragma unroll
        for (int turn = 0; turn < AT_ONCE; ++turn)
#pragma unroll
            for (int member = 0; member < MEMBERS; ++member)
                if (steps[member] != Wide(0) && at + turn * stride < vectors)
                    rows[turn][member] =
                        ((const Row*)(mean.sources[member] + offset))[at + turn * stride];
#pragma unroll
        for (int turn = 0; turn < AT_ONCE; ++turn) {
            if (at + turn * stride >= vectors) break;
            Row result;
            Wide parts[MEMBERS + 1] = {};
#pragma unroll
            for (int place = 0; place < LENGTH; ++place) {
                Wide middle = Wide(0) / Wide(0);  // of no member: NaN
#pragma unroll
                for (int member = 0; member < MEMBERS; ++member) {
                    if (steps[member] == Wide(0)) continue;
                    const Wide value = widen(rows[turn][member].values[place]);
                    middle = steps[member] == Wide(1) ? value : towards(middle, value, steps[member]);
                }
                narrow(middle, result.values[place]);
                if (!measures) continue;
#pragma unroll
                for (int member = 0; member < MEMBERS; ++member) {
                    if (steps[member] == Wide(0)) continue;
                    const Wide away = Wide(widen(rows[turn][member].values[place])) - middle;
                    parts[member] += away * away;
                }
                parts[MEMBERS] += middle * middle;
            }
            for (Address target = 0; target < mean.written; ++target)
                ((Row*)(mean.targets[target] + offset))[at + turn * stride] = result;
            if (measures)
#pragma unroll
                for (int member = 0; member <= MEMBERS; ++member) squares[member] += parts[member];
        }
    }
}

template <typename Element, typename Wide>
__device__ inline void mean_of(const Mean& mean) {
    // Member by member, each as far towards it as its share of those so far.
    Wide steps[MEMBERS];
    double so_far = 0.0;
#pragma unroll
    for (int member = 0; member < MEMBERS; ++member) {
        const unsigned char* bad = (const unsigned char*)mean.bad[member];
        const double weight = bad && *bad ? 0.0 : mean.weights[member];
        so_far += weight;
        steps[member] = weight == 0.0 ? Wide(0) : Wide(weight / so_far);
    }
    Address addresses = 0;
    for (int member = 0; member < MEMBERS; ++member) addresses |= mean.sources[member];
    for (Address target = 0; target < mean.written; ++target) addresses |= mean.targets[target];
    const int length = 16 / sizeof(Element);
    const Address vectors = addresses % 16 ? 0 : mean.count / length;
    const bool measures = mean.rows != 0;
    double squares[MEMBERS + 1] = {};
    mean_of_vectors<Element, Wide, length, MEMBERS <= 2 ? 4 : MEMBERS <= 4 ? 2 : 1>(
        mean, steps, 0, vectors, measures, squares
    );
    mean_of_vectors<Element, Wide, 1, 1>(
        mean, steps, vectors * 16, mean.count - vectors * length, measures, squares
    );
    if (!measures) return;
    __shared__ double sums[THREADS];
    for (int member = 0; member <= MEMBERS; ++member) {
        sums[threadIdx.x] = squares[member];
        __syncthreads();
        for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
            if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
            __syncthreads();
        }
        if (threadIdx.x == 0) ((double*)mean.rows)[blockIdx.x * (MEMBERS + 1) + member] = sums[0];
    }
}

// Memory times a factor that the device knows: by 1 it is not touched, by 0 it becomes 0, whatever it holds.
template <typename Element>
__device__ inline void scale(Element* memory, Address count, const double* factor) {
    if (*factor == 1.0) return;
    const Address stride = (Address)gridDim.x * blockDim.x;
    for (Address at = (Address)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += stride) {
        if (*factor == 0.0)
            memory[at] = Element();
        else
            narrow(widen(memory[at]) * (decltype(widen(memory[at])))*factor, memory[at]);
    }
}

#define KERNELS(name, Element, Wide)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) mean_##name(const Mean mean) {                   \
        mean_of<Element, Wide>(mean);                                                                      \
    }                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) scale_##name(                                    \
        Element* memory, Address count, const double* factor                                               \
    ) {                                                                                                    \
        scale(memory, count, factor);                                                                      \
    }

KERNELS(float32, float, float)
KERNELS(float64, double, double)
KERNELS(bfloat16, Bfloat16, float)
KERNELS(float16, Half, float)
