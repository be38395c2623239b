// A fake NVSHMEM host library for tests: version FAKE_NVSHMEM [3.4.5], status FAKE_STATUS [4] after initialisation. With
// NVSHMEM_DISABLE_CUDA_VMM its heap has the fixed size NVSHMEM_SYMMETRIC_SIZE, which it logs. Calls are logged to
// FAKE_NVSHMEM_LOG. Structures are accessed by their offsets in NVSHMEM's headers.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank = -1, n_pes = -1, status;
static size_t heap = 1 << 27;

static void note(const char* what) {
    const char* path = getenv("FAKE_NVSHMEM_LOG");
    FILE* file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", what);
        fclose(file);
    }
}

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
    const char* text = getenv("FAKE_NVSHMEM");
    sscanf(text ? text : "3.4.5", "%d.%d.%d", major, minor, patch);
}
int nvshmemx_init_status(void) { return status; }
int nvshmemx_get_uniqueid(void* id) {
    memset((char*)id + 4, 0xab, 124);
    return *(int*)id != 65664;
}
int nvshmemx_set_attr_uniqueid_args(int my_rank, int ranks, const void* id, char* attributes) {
    if (*(int*)attributes != 65680 || *(int*)(attributes + 16) != 65664 || *(int*)(attributes + 24) != 65560) return 22;
    *(const void**)(attributes + 32) = id;
    *(int*)(attributes + 40) = my_rank;
    *(int*)(attributes + 44) = ranks;
    return 0;
}
int nvshmemx_hostlib_init_attr(unsigned flags, char* attributes) {
    const unsigned char* id = *(const unsigned char**)(attributes + 32);
    const char* wanted = getenv("FAKE_STATUS");
    if (flags != 8 || !id || id[4] != 0xab || id[127] != 0xab) return 23;
    rank = *(int*)(attributes + 40);
    n_pes = *(int*)(attributes + 44);
    status = wanted ? atoi(wanted) : 4;
    note("init");
    if (getenv("NVSHMEM_DISABLE_CUDA_VMM")) {
        const char* size = getenv("NVSHMEM_SYMMETRIC_SIZE");
        char line[64];
        heap = size ? strtoull(size, NULL, 10) : 1 << 30;
        snprintf(line, sizeof line, "heap of %zu bytes", heap);
        note(line);
    }
    return 0;
}
void nvshmemx_hostlib_finalize(void) { note("finalize"); }
int nvshmemx_cumodule_init(void* module) { note("module"); return module == NULL; }
int nvshmemx_cumodule_finalize(void* module) { note("module ends"); return module == NULL; }
static char* last; // allocated, with its size
static size_t last_bytes;
void* nvshmem_malloc(size_t bytes) {
    last_bytes = bytes;
    return last = bytes > heap ? NULL : malloc(bytes);
}
void nvshmem_free(void* place) { free(place); }
void* nvshmem_ptr(const void* place, int pe) {
    const char* unreachable = getenv("FAKE_UNREACHABLE"); // a PE whose memory cannot be mapped
    return unreachable && atoi(unreachable) == pe ? NULL : (char*)place + 4096 * pe;
}
int nvshmem_my_pe(void) { return rank; }
int nvshmem_n_pes(void) { return n_pes; }
void nvshmem_barrier_all(void) {}
void nvshmem_quiet(void) {}
void nvshmemx_barrier_all_on_stream(void* stream) { (void)stream; }
// Logs the operation with its PE; invalid operations are logged as "wrong".
static void on_stream(const char* what, const void* place, size_t bytes, int pe, void* stream) {
    char line[128];
    const int inside = last && (const char*)place >= last && (const char*)place + bytes <= last + last_bytes;
    const int right = inside && stream == (void*)7 && pe >= 0 && pe < n_pes;
    snprintf(line, sizeof line, "%sPE %d %s %zu bytes, PE %d", right ? "" : "wrong: ", rank, what, bytes, pe);
    note(line);
}
void nvshmemx_putmem_on_stream(void* to, const void* from, size_t bytes, int pe, void* stream) {
    on_stream("puts", to, bytes, from == to ? -1 : pe, stream);
}
void nvshmemx_getmem_on_stream(void* to, const void* from, size_t bytes, int pe, void* stream) {
    on_stream("gets", from, bytes, from == to ? -1 : pe, stream);
}
static uint64_t turn_put, turn_awaited; // each is one more than its predecessor, or 1
void nvshmemx_putmem_signal_on_stream(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int op,
                                      int pe, void* stream) {
    const int right = op == 9 && (value == turn_put + 1 || value == 1) && from != to && (char*)signal != to;
    turn_put = value;
    on_stream("signals", to, bytes, right ? pe : -1, stream);
}
void nvshmemx_signal_wait_until_on_stream(uint64_t* signal, int compare, uint64_t value, void* stream) {
    if (status == 3) exit(255); // like the real one
    const int right = compare == 5 && (value == turn_awaited + 1 || value == 1);
    turn_awaited = value;
    on_stream("waits for", signal, sizeof *signal, right ? 1 - rank : -1, stream);
}
#ifndef WITHOUT_QUIET
void nvshmemx_quiet_on_stream(void* stream) { (void)stream; note("quiet"); }
#endif
