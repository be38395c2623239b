// Every kernel of the library. A kernel's source is included here and compiled by nvcc on its own.
#include "../route.h"
#include "../plan.h"
#include "../route_backward.h"
#include "../router_gradients.h"
#include "../all_reduce.h"
