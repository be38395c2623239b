/* The calls of the MPI transport (shmem/src/mpi/mod.rs) in C, to measure their cost without Rust.
 *
 *   mpicc -O2 -o mpi_rma benches/mpi_rma.c && mpirun -n 2 ./mpi_rma c SAMPLES BATCH BYTES...
 *
 * PE 0 prints one line per sample, "c,OP,BYTES,SAMPLE,VALUE", as benches/mpi_rma.rs does. VALUE is half the round trip
 * in microseconds for put_signal, and GB/s of BATCH puts and a flush for put. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POLLS_PER_PROBE = 16, WARMUP = 3 };

static MPI_Win window;
static char *heap;
static int me;

static void put(const void *from, int bytes, MPI_Aint at, int pe)
{
    MPI_Put(from, bytes, MPI_UINT8_T, pe, at, bytes, MPI_UINT8_T, window);
}

static void put_signal(const void *from, int bytes, MPI_Aint at, MPI_Aint signal, uint64_t value, int pe)
{
    put(from, bytes, at, pe);
    MPI_Win_flush(pe, window);
    MPI_Accumulate(&value, 1, MPI_UINT64_T, pe, signal, 1, MPI_UINT64_T, MPI_REPLACE, window);
    MPI_Win_flush_local(pe, window);
}

static void wait_for(MPI_Aint signal, uint64_t value)
{
    unsigned polls = 0;
    int flag;
    while (__atomic_load_n((uint64_t *)(heap + signal), __ATOMIC_ACQUIRE) < value)
        if (++polls % POLLS_PER_PROBE == 0)
            MPI_Iprobe(MPI_ANY_SOURCE, 2, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
}

int main(int argc, char **argv)
{
    int level;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    if (argc < 5) {
        if (me == 0)
            fprintf(stderr, "usage: mpi_rma NAME SAMPLES BATCH BYTES...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    const int samples = atoi(argv[2]), batch = atoi(argv[3]);
    MPI_Aint largest = 0;
    for (int i = 4; i < argc; i++)
        largest = atol(argv[i]) > largest ? atol(argv[i]) : largest;
    const MPI_Aint signal = (largest + 63) / 64 * 64;

    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "same_size", "true");
    MPI_Info_set(info, "same_disp_unit", "true");
    MPI_Info_set(info, "accumulate_ordering", "none");
    MPI_Info_set(info, "acc_single_intrinsic", "true");
    MPI_Win_allocate(signal + 64, 1, info, MPI_COMM_WORLD, &heap, &window);
    MPI_Info_free(&info);
    MPI_Win_lock_all(MPI_MODE_NOCHECK, window);
    memset(heap, 0, signal + 64);
    MPI_Win_sync(window);
    /* The memset maps each page to separate memory. */
    char *source = malloc(largest + 1);
    memset(source, 1, largest + 1);
    uint64_t count = 0;

    for (int i = 4; i < argc; i++) {
        const int bytes = atoi(argv[i]);
        for (int sample = -WARMUP; sample < samples; sample++) {
            MPI_Barrier(MPI_COMM_WORLD);
            const double start = MPI_Wtime();
            for (int k = 0; k < batch && me < 2; k++) {
                count++;
                if (me == 0)
                    put_signal(source, bytes, 0, signal, count, 1);
                wait_for(signal, count);
                if (me == 1)
                    put_signal(source, bytes, 0, signal, count, 0);
            }
            const double us = (MPI_Wtime() - start) * 1e6 / (2.0 * batch);
            if (me == 0 && sample >= 0)
                printf("%s,put_signal,%d,%d,%.4f\n", argv[1], bytes, sample, us);
        }
        for (int sample = -WARMUP; sample < samples; sample++) {
            MPI_Barrier(MPI_COMM_WORLD);
            const double start = MPI_Wtime();
            if (me == 0) {
                for (int k = 0; k < batch; k++) {
                    put(source, bytes, 0, 1);
                    MPI_Win_flush_local(1, window);
                }
                MPI_Win_flush(1, window);
            }
            const double seconds = MPI_Wtime() - start;
            if (me == 0 && sample >= 0)
                printf("%s,put,%d,%d,%.4f\n", argv[1], bytes, sample, (double)bytes * batch / seconds * 1e-9);
        }
    }
    free(source);
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
