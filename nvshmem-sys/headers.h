// Input of nvshmem-sys/generate.
#include <nvshmem.h>
#include <nvshmemx.h>
