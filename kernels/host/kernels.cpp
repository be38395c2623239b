// Every kernel of the library. A kernel's source is included here and compiled by nvcc on its own.
#include "../layer_ampere.cu"
#include "../layer_ampere_64x128.cu"
#include "../layer_hopper.cu"
#include "../layer_hopper_128x128.cu"
#include "../layer_hopper_256x256.cu"
#include "../probe.cu"
#include "../routing.cu"
#include "../smoke.cu"
