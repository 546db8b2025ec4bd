"""`setup`: a loop that the user owns, on several devices."""
