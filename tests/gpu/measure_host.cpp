#include "tests/gpu/measure.cu"
