// NCCL for tests: of version 2.27.3. It notes what is sent and received in the file FAKE_NVSHMEM_LOG. FAKE_NCCL:
//   duplicate   refuses to start, as the real one does several PEs on one device
//   pe1         refuses on PE 1 alone          hang   does not return from its start
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
typedef void* Handle;

static int me = -1, ranks, depth;
static char last[128];

static int is(const char* what) {
    const char* text = getenv("FAKE_NCCL");
    return text && !strcmp(text, what);
}
static int note(const char* what, size_t bytes, int type, int peer, Handle communicator, Handle stream) {
    const char* path = getenv("FAKE_NVSHMEM_LOG");
    FILE* file = path ? fopen(path, "a") : NULL;
    const int right = type == 1 && peer >= 0 && peer < ranks && peer != me && communicator == (Handle)13 && stream == (Handle)7;
    if (file) {
        fprintf(file, "%sPE %d %s %zu bytes, PE %d%s\n", right ? "" : "wrong: ", me, what, bytes, peer, depth ? ", in a group" : "");
        fclose(file);
    }
    return 0;
}

int ncclGetVersion(int* version) { *version = 22703; return 0; }
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
int ncclCommAbort(Handle communicator) { return note("leaves", 0, 1, 1 - me, communicator, (Handle)7); }
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) { return --depth ? 5 : 0; }
int ncclSend(const void* from, size_t bytes, int type, int peer, Handle communicator, Handle stream) {
    return from ? note("sends", bytes, type, peer, communicator, stream) : 4;
}
int ncclRecv(void* to, size_t bytes, int type, int peer, Handle communicator, Handle stream) {
    return to ? note("receives", bytes, type, peer, communicator, stream) : 4;
}
