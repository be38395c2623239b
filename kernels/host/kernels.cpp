// Every kernel of the library. A kernel's source is included here and compiled by nvcc on its own.
