// A fake CUDA driver for tests: devices as described by the environment, host memory, launches of one kernel. Written
// against cuda.h, independently of cudarc's types.
//
//   FAKE_VERSION [13000]   FAKE_DEVICES [1]   FAKE_CAPABILITY [80], major and minor
//   FAKE_MEMORY       bytes per device        FAKE_INIT [0], the result of cuInit
//   FAKE_PUTS         the kernel's result: "1 3 -1 2" for PE, number of PEs, PE whose put is lost, PE whose put is wrong; "job" for
//                     the numbers in the launcher's environment; if unset, its last two parameters and the number of launches
//   FAKE_TICK         milliseconds from one event to the next, in addition to one per launch
//   FAKE_STUCK        if set, the stream hangs after the first event
//   FAKE_NO_REACH     if set, no device can access another's memory
//   FAKE_UNKNOWN      an allocation of this many bytes fails with an unassigned code
//   FAKE_DRIVER_LOG   a file: every module has every kernel, every stream exists, launches compute nothing, and each call that uses a stream
//                     or memory appends a line. Words after a launch's "pass" are those of `Pass` of kernels/params.h
// WITHOUT_TENSOR_MAPS and WITHOUT_VERSION leave these functions out; STUB builds a toolkit's stub library.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned CUresult;
typedef void* Handle;

#ifdef STUB
CUresult cuDriverGetVersion(int* version) { (void)version; return 34; }
CUresult cuInit(unsigned flags) { (void)flags; return 34; }
#else

static long number(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}

static size_t used;
static unsigned launches, recorded;
static uint64_t* written; // by the most recently launched or recorded kernel
static int recording, events;

static __thread Handle current; // this thread's context

static int is_logging(void) { return getenv("FAKE_DRIVER_LOG") != NULL; }
// Appends a line to the log. Whether the call is a mistake without a log too: `stream` must then be the one that was created.
static int wrong(Handle stream, const char* format, ...) {
    if (!is_logging()) return stream != (Handle)7;
    FILE* file = fopen(getenv("FAKE_DRIVER_LOG"), "a");
    if (!file) return 1;
    va_list values;
    va_start(values, format);
    fprintf(file, "%sstream %lu: ", current ? "" : "no context: ", (unsigned long)(uintptr_t)stream);
    vfprintf(file, format, values);
    va_end(values);
    fputc('\n', file);
    fclose(file);
    return 0;
}

static int stuck(void) { return events > 0 && getenv("FAKE_STUCK") != NULL; }

#ifndef WITHOUT_VERSION
CUresult cuDriverGetVersion(int* version) { *version = (int)number("FAKE_VERSION", 13000); return 0; }
#endif
CUresult cuInit(unsigned flags) { return flags ? 1 : (CUresult)number("FAKE_INIT", 0); }
CUresult cuGetErrorName(CUresult code, const char** name) {
    *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *name ? 0 : 1;
}
CUresult cuGetErrorString(CUresult code, const char** text) { *text = code == 1 ? "invalid argument" : NULL; return 0; }
CUresult cuDeviceGetCount(int* count) { *count = (int)number("FAKE_DEVICES", 1); return 0; }
CUresult cuDeviceGet(int* device, int i) { *device = 100 + i; return 0; }
CUresult cuDeviceGetName(char* name, int len, int device) { snprintf(name, len, "Fake %d", device - 100); return 0; }
CUresult cuDeviceGetPCIBusId(char* id, int len, int device) {
    snprintf(id, len, "0000:0%d:00.0", device - 93);
    return 0;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
    long capability = number("FAKE_CAPABILITY", 80);
    (void)device;
    switch (attribute) {
    case 16: *value = 10; return 0;
    case 75: *value = (int)(capability / 10); return 0;
    case 76: *value = (int)(capability % 10); return 0;
    case 95: *value = 1; return 0;
    case 97: *value = (capability < 90 ? 163 : 227) << 10; return 0;
    default: return 1;
    }
}
CUresult cuDeviceCanAccessPeer(int* reaches, int from, int to) { *reaches = !getenv("FAKE_NO_REACH"); return from == to; }
CUresult cuDeviceTotalMem_v2(size_t* bytes, int device) { (void)device; *bytes = number("FAKE_MEMORY", 1 << 20); return 0; }
CUresult cuDevicePrimaryCtxRetain(Handle* context, int device) { *context = (Handle)(intptr_t)device; return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
CUresult cuCtxSetCurrent(Handle context) {
    current = context;
    return context ? 0 : 1;
}
CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    *total = number("FAKE_MEMORY", 1 << 20);
    *free = *total - used;
    return 0;
}
// The size is stored in front of each allocation.
CUresult cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    if (bytes == (size_t)number("FAKE_UNKNOWN", -1)) return 1000;
    if (used + bytes > (size_t)number("FAKE_MEMORY", 1 << 20)) return 2;
    wrong((Handle)7, "allocates %zu bytes", bytes);
    char* place = aligned_alloc(256, (bytes + 511) / 256 * 256);
    memset(place, 0xff, bytes + 256);
    memcpy(place, &bytes, sizeof bytes);
    used += bytes;
    *address = (uint64_t)(uintptr_t)(place + 256);
    return 0;
}
CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
    wrong((Handle)7, "allocates %zu bytes of the host", bytes);
    *memory = flags == 3 ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    return *memory ? 0 : 1;
}
CUresult cuMemFreeHost(void* memory) {
    free(memory);
    return 0;
}
CUresult cuMemFree_v2(uint64_t address) {
    size_t bytes;
    char* place = (char*)(uintptr_t)address - 256;
    memcpy(&bytes, place, sizeof bytes);
    wrong((Handle)7, "frees %zu bytes", bytes);
    used -= bytes;
    free(place);
    return 0;
}
CUresult cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Handle stream) {
    if (!stream || recording || wrong(stream, "copies %zu bytes in", bytes)) return 1;
    memcpy((void*)(uintptr_t)to, from, bytes);
    return 0;
}
CUresult cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Handle stream) {
    if (!stream || recording || wrong(stream, "copies %zu bytes out", bytes)) return 1;
    memcpy(to, (void*)(uintptr_t)from, bytes);
    return 0;
}
CUresult cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, Handle stream) {
    if (!stream || wrong(stream, "sets %zu bytes", bytes)) return 1;
    memset((void*)(uintptr_t)to, value, bytes);
    return 0;
}
CUresult cuStreamCreate(Handle* stream, unsigned flags) { *stream = flags == 1 ? (Handle)7 : NULL; return flags != 1; }
CUresult cuStreamDestroy_v2(Handle stream) { return stream != (Handle)7; }
CUresult cuStreamQuery(Handle stream) { return stuck() ? 600 : wrong(stream, "is queried"); }
CUresult cuStreamSynchronize(Handle stream) {
    while (stuck()) pause();
    return wrong(stream, "is waited for");
}
CUresult cuStreamBeginCapture_v2(Handle stream, int mode) {
    recording = 1;
    recorded = 0;
    return stream != (Handle)7 || mode != 1;
}
CUresult cuStreamEndCapture(Handle stream, Handle* graph) {
    recording = 0;
    *graph = (Handle)8;
    return stream != (Handle)7;
}
CUresult cuGraphInstantiateWithFlags(Handle* ready, Handle graph, unsigned long long flags) {
    *ready = (Handle)9;
    return graph != (Handle)8 || flags;
}
CUresult cuGraphLaunch(Handle ready, Handle stream) {
    launches += recorded;
    written[2] = launches;
    return ready != (Handle)9 || stream != (Handle)7;
}
CUresult cuGraphDestroy(Handle graph) { return graph != (Handle)8; }
CUresult cuGraphExecDestroy(Handle ready) { return ready != (Handle)9; }
CUresult cuModuleLoadData(Handle* module, const void* image) {
    const unsigned char magic[4] = {0x50, 0xed, 0x55, 0xba};
    if (number("FAKE_VERSION", 13000) < number("FAKE_NEEDS", 0)) return 222;
    *module = (Handle)image;
    return memcmp(image, magic, 4) ? 1 : 0;
}
CUresult cuModuleUnload(Handle module) { return module == NULL; }
static char* names[32]; // of the kernels of a log
static unsigned kernels;
static int is_kernel(Handle function) {
    unsigned i = 0;
    while (i < kernels && names[i] != function) ++i;
    return i < kernels;
}
CUresult cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    if (is_logging()) {
        *function = kernels < 32 ? (names[kernels++] = strdup(name)) : NULL;
        return *function == NULL;
    }
    const int loop = !strncmp(name, "p2p_", 4);
    *function = loop ? (Handle)12 : (Handle)11;
    return !module ? 1 : strcmp(name, "aristos_smoke") && !loop ? 500 : 0;
}
CUresult cuFuncSetAttribute(Handle function, int attribute, int value) {
    if (is_kernel(function)) return attribute != 8 || value <= 48 << 10 || value > 227 << 10;
    return function != (Handle)11 || attribute != 8 || value <= 48 << 10 || value > 163 << 10;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle function, int threads, size_t shared) {
    *blocks = function == (Handle)12 ? 4 : shared > 81 << 10 ? 1 : 2;
    return (function != (Handle)11 && function != (Handle)12 && !is_kernel(function)) || threads <= 0;
}
// Logs a launch of a layer's kernel. All but the first kernel of a pass have a `Pass` as their second parameter.
static CUresult launch_logged(const char* name, unsigned grid, unsigned block, Handle stream, void** parameters) {
    char words[9 * 18 + 1] = "";
    if (grid == 0 || block == 0) return 1;
    if (strcmp(name, "aristos_begin_pass"))
        for (int i = 0; i < 9; ++i) sprintf(words + strlen(words), " %lx", ((unsigned long*)parameters[1])[i]);
    return wrong(stream, "launches %s, %u blocks, pass%s", name, grid, words);
}
static CUresult launch(unsigned grid, unsigned block, Handle stream, void** parameters) {
    if (stream != (Handle)7 || grid == 0 || block == 0) return 1;
    // area, result, value, limit
    uint64_t* out = written = *(uint64_t**)parameters[1];
    if (recording) {
        recorded++;
        return 0;
    }
    out[0] = *(uint64_t*)parameters[2];
    out[1] = *(uint64_t*)parameters[3];
    out[2] = ++launches;
    // The result of smoke.cu: "PE, PEs, PE whose put is lost, PE whose put is wrong", -1 for none.
    const char* puts = getenv("FAKE_PUTS");
    if (!puts) return 0;
    long seen[4] = {number("ARISTOS_PE", -1), number("ARISTOS_N_PES", -1), -1, -1};
    if (strcmp(puts, "job") && sscanf(puts, "%ld %ld %ld %ld", &seen[0], &seen[1], &seen[2], &seen[3]) != 4) return 1;
    for (int i = 0; i < 4; i++) out[i] = (uint64_t)seen[i];
    out[4] = 3, out[5] = 17;
    return 0;
}
CUresult cuLaunchKernel(Handle f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared,
                        Handle stream, void** parameters, void** extra) {
    (void)shared;
    if (is_kernel(f)) return launch_logged(f, x, a, stream, parameters);
    return f != (Handle)11 || y != 1 || z != 1 || b != 1 || c != 1 || extra ? 1 : launch(x, a, stream, parameters);
}
// The result of a loop of kernels/p2p.cu: 2 us per operation, 1 us until the call returned.
static CUresult loop(unsigned grid, unsigned block, Handle stream, void** parameters) {
    if (stream != (Handle)7 || grid == 0 || block != 1024) return 1;
    const char* arguments = parameters[0];
    uint64_t *cycles = *(uint64_t**)(arguments + 24), *issue = *(uint64_t**)(arguments + 32), *total = *(uint64_t**)(arguments + 40);
    for (uint32_t i = 0; i < *(const uint32_t*)(arguments + 64); ++i) cycles[i] = 2000, issue[i] = 1000;
    total[0] = total[1] = 1000;
    return 0;
}
CUresult cuLaunchCooperativeKernel(Handle f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                                   unsigned shared, Handle stream, void** parameters) {
    (void)shared;
    if (is_kernel(f)) return launch_logged(f, x, a, stream, parameters);
    if (y != 1 || z != 1 || b != 1 || c != 1) return 1;
    return f == (Handle)12 ? loop(x, a, stream, parameters) : f == (Handle)11 ? launch(x, a, stream, parameters) : 1;
}
// As in cuda.h. The attributes are the cluster size and, for a launch, that it is cooperative.
typedef struct { int id; char pad[4]; union { unsigned dim[3]; int cooperative; char pad[64]; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; Handle stream; const Attribute* attributes; unsigned count; } Config;
static int in_pairs(const Config* config, unsigned count) {
    const Attribute* a = config->attributes;
    if (config->count != count || a[0].id != 4 || a[0].value.dim[0] != 2 || a[0].value.dim[1] != 1 || a[0].value.dim[2] != 1) return 0;
    if (count == 2 && (a[1].id != 2 || a[1].value.cooperative != 1)) return 0;
    return config->grid[0] % 2 == 0 && config->grid[1] == 1 && config->grid[2] == 1 && config->block[1] == 1 && config->block[2] == 1;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, Handle function, const Config* config) {
    *clusters = 3;
    return (function != (Handle)11 && !is_kernel(function)) || !in_pairs(config, 1);
}
CUresult cuLaunchKernelEx(const Config* config, Handle f, void** parameters, void** extra) {
    if ((f != (Handle)11 && !is_kernel(f)) || extra || !in_pairs(config, 2)) return 1;
    if (is_kernel(f)) return launch_logged(f, config->grid[0], config->block[0], config->stream, parameters);
    return launch(config->grid[0], config->block[0], config->stream, parameters);
}
CUresult cuEventCreate(Handle* event, unsigned flags) { *event = malloc(sizeof(unsigned)); return flags; }
CUresult cuEventRecord(Handle event, Handle stream) {
    *(unsigned*)event = launches + events++ * number("FAKE_TICK", 0);
    return stream != (Handle)7;
}
CUresult cuEventElapsedTime(float* milliseconds, Handle from, Handle to) {
    *milliseconds = (float)(*(unsigned*)to - *(unsigned*)from);
    return 0;
}
CUresult cuEventDestroy_v2(Handle event) { free(event); return 0; }
#ifndef WITHOUT_TENSOR_MAPS
CUresult cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const uint64_t* size,
                                const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                                int swizzle, int promotion, int fill) {
    uint64_t seen[16] = {(uint64_t)type, rank, (uint64_t)(uintptr_t)base};
    unsigned used = 3;
    for (unsigned i = 0; i < rank; i++) seen[used++] = size[i];
    for (unsigned i = 0; i + 1 < rank; i++) seen[used++] = strides[i];
    for (unsigned i = 0; i < rank; i++) seen[used++] = box[i];
    for (unsigned i = 0; i < rank; i++) seen[used] = 10 * seen[used] + steps[i];
    seen[used + 1] = (uint64_t)(interleave * 1000 + swizzle * 100 + promotion * 10 + fill);
    if ((uintptr_t)map % 64) return 1;
    memcpy(map, seen, sizeof seen);
    return 0;
}
#endif
#endif
