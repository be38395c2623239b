/* MPICH 4.0 with UCX over TCP does not always come out of MPI_Finalize: a program that does nothing else.
 *
 *   mpicc.mpich -o finalize tests/hosts/mpich_finalize.c
 *   tests/hosts/hosts 3 sh -c 'for i in $(seq 10); do timeout 5 mpirun.mpich -launcher ssh -launcher-exec tests/hosts/hosts -hosts $HOSTS \
 *       -genv UCX_TLS tcp -genv UCX_NET_DEVICES eth0 -n 4 ./finalize || echo "run $i does not end"; done'
 *
 * A rank that has closed its own connections reads the process manager's answer to a barrier (MPIR_pmi_barrier), and serves nobody meanwhile;
 * one that waits for the end of a connection to it (ucp_disconnect_nb) waits for ever. MPICH 4.2 has no such barrier any more (its pull request
 * 6596). */
#include <mpi.h>

int main(void)
{
    MPI_Init(0, 0);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    return 0;
}
