// All kernels of the library. nvcc compiles each of these sources on its own.
#include "../layer_ampere.cu"
#include "../layer_ampere_64x128.cu"
#include "../layer_hopper.cu"
#include "../layer_hopper_128x128.cu"
#include "../layer_hopper_256x256.cu"
#include "../probe.cu"
#include "../routing.cu"
#include "../smoke.cu"
