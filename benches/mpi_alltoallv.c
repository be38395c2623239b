/* Time of MPI_Alltoallv with equal sizes between all pairs of processes, as a bulk-synchronous layer calls it.
 *
 *   mpicc -O2 -o mpi_alltoallv benches/mpi_alltoallv.c && mpirun -n 2 ./mpi_alltoallv BYTES SAMPLES
 *
 * Prints the median over samples of the slowest process's time, seconds. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARMUP = 2 };

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    int me, n;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    int bytes = argc == 3 ? atoi(argv[1]) : 0, samples = argc == 3 ? atoi(argv[2]) : 0;
    if (bytes < 1 || samples < 1) {
        if (me == 0)
            fprintf(stderr, "usage: mpi_alltoallv BYTES SAMPLES\n");
        MPI_Finalize();
        return 2;
    }
    char *out = calloc(n, bytes), *in = calloc(n, bytes);
    int *counts = malloc(n * sizeof *counts), *offsets = malloc(n * sizeof *offsets);
    double *seconds = malloc(samples * sizeof *seconds);
    for (int pe = 0; pe < n; pe++) {
        counts[pe] = pe == me ? 0 : bytes;
        offsets[pe] = pe * bytes;
    }
    for (int sample = -WARMUP; sample < samples; sample++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime(), own;
        MPI_Alltoallv(out, counts, offsets, MPI_CHAR, in, counts, offsets, MPI_CHAR, MPI_COMM_WORLD);
        own = MPI_Wtime() - start;
        MPI_Allreduce(&own, &start, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (sample >= 0)
            seconds[sample] = start;
    }
    qsort(seconds, samples, sizeof *seconds, ascending);
    if (me == 0)
        printf("%.6f\n", seconds[samples / 2]);
    MPI_Finalize();
    return 0;
}
