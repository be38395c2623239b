/* Constants of mpi.h that are macros with casts, which bindgen cannot read, and that the crate mpi lacks. */
#include <mpi.h>

const MPI_Op aristos_mpi_replace = MPI_REPLACE;
const int aristos_mpi_win_model = MPI_WIN_MODEL;
const int aristos_mpi_win_unified = MPI_WIN_UNIFIED;
const int aristos_mpi_mode_nocheck = MPI_MODE_NOCHECK;
