/* Reproduces a hang of MPICH 4.0 with UCX over TCP in MPI_Finalize.
 *
 *   mpicc.mpich -o finalize tests/hosts/mpich_finalize.c
 *   tests/hosts/hosts 3 sh -c 'for i in $(seq 10); do timeout 5 mpirun.mpich -launcher ssh -launcher-exec tests/hosts/hosts -hosts $HOSTS \
 *       -genv UCX_TLS tcp -genv UCX_NET_DEVICES eth0 -n 4 ./finalize || echo "run $i does not end"; done'
 *
 * A rank that has closed its connections blocks in the process manager's barrier (MPIR_pmi_barrier) without progress, so a rank
 * that waits for its connection to it to close (ucp_disconnect_nb) hangs. MPICH 4.2 no longer has this barrier (pull request 6596). */
#include <mpi.h>

int main(void)
{
    MPI_Init(0, 0);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    return 0;
}
