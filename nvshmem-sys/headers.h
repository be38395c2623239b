// What nvshmem-sys/generate reads.
#include <nvshmem.h>
#include <nvshmemx.h>
