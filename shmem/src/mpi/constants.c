/* What mpi.h has as macros, which bindgen cannot read where they are casts, and rsmpi's own list lacks. */
#include <mpi.h>

const MPI_Op aristos_mpi_replace = MPI_REPLACE;
const int aristos_mpi_win_model = MPI_WIN_MODEL;
const int aristos_mpi_win_unified = MPI_WIN_UNIFIED;
const int aristos_mpi_mode_nocheck = MPI_MODE_NOCHECK;
