// A fake NCCL for tests. It logs sends, receives and operations on symmetric memory to FAKE_NVSHMEM_LOG. FAKE_NCCL:
//   duplicate    refuses to start, as the real one does with several PEs per device
//   pe1          refuses to start on PE 1 only        hang   never returns from the start
//   nowindow     has no symmetric memory              full1  out of memory on PE 1 above 64 KiB
//   refuses1     fails to register on PE 1 above 64 KiB, after releasing the other PEs
//   stuck        never returns from registering above 64 KiB
//   later        registers asynchronously: in progress until the third query
//   FAKE_NCCL_VERSION [22703]      FAKE_UNREACHABLE   a PE whose memory cannot be mapped
// Symmetric memory consists of files in the folder FAKE_NCCL_DIR, which the PE processes map.
// WITHOUT_PEERS leaves out ncclGetPeerDevicePointer.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
typedef void* Handle;
// `window` is the number of the memory's window, from 1, the same on all ranks; 0 without a window.
typedef struct { int number, window; char* place; size_t bytes; } Memory;

static int me = -1, ranks, depth, memories, windows, asked;
static Memory all[64];
static char last[128];

static int is(const char* what) {
    const char* text = getenv("FAKE_NCCL");
    return text && !strcmp(text, what);
}
static void say(const char* line) {
    const char* path = getenv("FAKE_NVSHMEM_LOG");
    FILE* file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s\n", line);
    fclose(file);
}
static int note(const char* what, size_t bytes, int type, int peer, Handle communicator, Handle stream) {
    char line[128];
    const int right = type == 1 && peer >= 0 && peer < ranks && peer != me && communicator == (Handle)13 && stream == (Handle)7;
    snprintf(line, sizeof line, "%sPE %d %s %zu bytes, PE %d%s", right ? "" : "wrong: ", me, what, bytes, peer, depth ? ", in a group" : "");
    say(line);
    return 0;
}
static void note_memory(const char* what, const Memory* memory, int right) {
    char line[128];
    snprintf(line, sizeof line, "%sPE %d %s memory %d", right ? "" : "wrong: ", me, what, memory ? memory->number : -1);
    say(line);
}

int ncclGetVersion(int* version) {
    const char* text = getenv("FAKE_NCCL_VERSION");
    *version = text ? atoi(text) : 22703;
    return 0;
}
const char* ncclGetLastError(Handle communicator) { (void)communicator; return last; }
int ncclGetUniqueId(Id* id) { memset(id, 0xcd, sizeof *id); return 0; }
int ncclCommInitRank(Handle* communicator, int n, Id id, int rank) {
    while (is("hang")) pause();
    if (id.internal[0] != (char)0xcd || id.internal[127] != (char)0xcd || rank < 0 || rank >= n) return 4;
    if (is("duplicate") || (is("pe1") && rank == 1)) {
        snprintf(last, sizeof last, "Duplicate GPU detected : rank %d and rank %d both on CUDA device 7000\n", rank, 1 - rank);
        return 5;
    }
    me = rank;
    ranks = n;
    *communicator = (Handle)13;
    return 0;
}
int ncclCommAbort(Handle communicator) {
    if (memories == 0) return note("leaves", 0, 1, 1 - me, communicator, (Handle)7);
    note_memory("leaves after", &all[memories - 1], communicator == (Handle)13);
    return 0;
}
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) { return --depth ? 5 : 0; }
int ncclSend(const void* from, size_t bytes, int type, int peer, Handle communicator, Handle stream) {
    return from ? note("sends", bytes, type, peer, communicator, stream) : 4;
}
int ncclRecv(void* to, size_t bytes, int type, int peer, Handle communicator, Handle stream) {
    return to ? note("receives", bytes, type, peer, communicator, stream) : 4;
}

int ncclCommCount(Handle communicator, int* count) { *count = ranks; return communicator != (Handle)13; }
int ncclCommUserRank(Handle communicator, int* rank) { *rank = me; return communicator != (Handle)13; }
int ncclCommCuDevice(Handle communicator, int* device) { *device = me; return communicator != (Handle)13; }

static void name(char* path, size_t bytes, const char* what, int pe, int number) {
    const char* folder = getenv("FAKE_NCCL_DIR");
    snprintf(path, bytes, "%s/%s-%d-%d", folder ? folder : ".", what, pe, number);
}
static char* map(const char* what, int pe, int number, size_t bytes, int make) {
    char path[256];
    name(path, sizeof path, what, pe, number);
    int fd = open(path, make ? O_RDWR | O_CREAT : O_RDWR, 0600);
    if (fd < 0 || (make && ftruncate(fd, (off_t)bytes))) return NULL;
    char* place = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return place == MAP_FAILED ? NULL : place;
}
int ncclMemAlloc(void** place, size_t bytes) {
    if (is("full1") && me == 1 && bytes > 64 << 10) {
        snprintf(last, sizeof last, "Cuda failure 2 'out of memory'");
        return 1;
    }
    Memory* memory = &all[memories];
    if (memories == 64 || !(memory->place = map("memory", me, memories, bytes, 1))) return 2;
    memset(memory->place, 0xff, bytes);
    memory->number = memories++;
    memory->bytes = bytes;
    note_memory("allocates", memory, 1);
    *place = memory->place;
    return 0;
}
static Memory* memory_at(const void* place) {
    for (int i = memories; i-- > 0;)
        if (place && all[i].place == place) return &all[i];
    return NULL;
}
int ncclMemFree(void* place) {
    Memory* memory = memory_at(place);
    note_memory("frees", memory, memory && !memory->window);
    if (!memory) return 4;
    munmap(memory->place, memory->bytes);
    memory->place = NULL;
    return 0;
}
// Like the real function it waits for all ranks without a limit.
int ncclCommWindowRegister(Handle communicator, void* place, size_t bytes, Handle* window, int flags) {
    Memory* memory = memory_at(place);
    const int large = bytes > 64 << 10;
    *window = NULL;
    if (communicator != (Handle)13 || !memory || memory->window || memory->bytes != bytes || flags != 1) return 4;
    if (is("nowindow")) return 0;
    while (is("stuck") && large) pause();
    char path[256], memory_path[256];
    name(memory_path, sizeof memory_path, "memory", me, memory->number);
    name(path, sizeof path, "window", me, ++windows);
    if (link(memory_path, path)) return 2;
    for (int pe = 0; pe < ranks; pe++) {
        name(path, sizeof path, "window", pe, windows);
        while (access(path, F_OK)) usleep(1000);
    }
    if (is("refuses1") && me == 1 && large) {
        snprintf(last, sizeof last, "it is not to be");
        return 3;
    }
    memory->window = windows;
    note_memory("registers", memory, 1);
    *window = memory;
    asked = 0;
    return is("later") ? 7 : 0;
}
int ncclCommGetAsyncError(Handle communicator, int* state) {
    *state = ++asked < 3 ? 7 : 0;
    return communicator != (Handle)13;
}
int ncclCommWindowDeregister(Handle communicator, Handle window) {
    Memory* memory = window;
    note_memory("deregisters", memory, memory && memory->window && communicator == (Handle)13);
    if (memory) memory->window = 0;
    return 0;
}
#ifndef WITHOUT_PEERS
int ncclGetPeerDevicePointer(Handle window, size_t offset, int pe, void** place) {
    const Memory* memory = window;
    const char* unreachable = getenv("FAKE_UNREACHABLE");
    if (!memory || !memory->window || pe < 0 || pe >= ranks || (is("later") && asked < 3)) return 4;
    char* first = unreachable && atoi(unreachable) == pe && me != pe ? NULL : map("window", pe, memory->window, memory->bytes, 0);
    *place = first ? first + offset : NULL;
    return 0;
}
#endif
