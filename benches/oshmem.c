/* Round trip of a put and a signal over OpenSHMEM 1.4, which has no put with signal: put, fence and an atomic set.
 *
 *   oshcc -O2 -o oshmem benches/oshmem.c && oshrun -n 2 ./oshmem NAME SAMPLES BATCH BYTES...
 *
 * PE 0 prints one line per sample, "NAME,put_signal,BYTES,SAMPLE,VALUE", as benches/mpi_rma.c does. VALUE is half the
 * round trip in microseconds. */
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WARMUP = 3 };

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

int main(int argc, char **argv)
{
    shmem_init();
    const int me = shmem_my_pe();
    if (argc < 5 || shmem_n_pes() != 2) {
        if (me == 0)
            fprintf(stderr, "usage: oshrun -n 2 oshmem NAME SAMPLES BATCH BYTES...\n");
        shmem_global_exit(2);
    }
    const int samples = atoi(argv[2]), batch = atoi(argv[3]);
    size_t largest = 1;
    for (int i = 4; i < argc; i++)
        largest = (size_t)atol(argv[i]) > largest ? (size_t)atol(argv[i]) : largest;
    char *data = shmem_align(64, largest), *source = malloc(largest);
    unsigned long *signal = shmem_align(64, 64), count = 0;
    *signal = 0;
    memset(source, 1, largest);
    shmem_barrier_all();
    for (int i = 4; i < argc; i++) {
        const size_t bytes = atol(argv[i]);
        for (int sample = -WARMUP; sample < samples; sample++) {
            shmem_barrier_all();
            const double start = now_us();
            for (int k = 0; k < batch; k++) {
                count++;
                if (me == 1)
                    shmem_ulong_wait_until(signal, SHMEM_CMP_GE, count);
                shmem_putmem(data, source, bytes, 1 - me);
                shmem_fence();
                shmem_ulong_atomic_set(signal, count, 1 - me);
                if (me == 0)
                    shmem_ulong_wait_until(signal, SHMEM_CMP_GE, count);
            }
            const double us = (now_us() - start) / (2.0 * batch);
            if (me == 0 && sample >= 0)
                printf("%s,put_signal,%zu,%d,%.4f\n", argv[1], bytes, sample, us);
        }
    }
    shmem_barrier_all();
    shmem_free(signal);
    shmem_free(data);
    free(source);
    shmem_finalize();
    return 0;
}
