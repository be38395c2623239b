// How the kernels of a layer are launched, and the sizes of the areas that their headers own.
#pragma once
#include "layer.h"

namespace aristos {

constexpr u32 HEADER_WORDS = 8;

}  // namespace aristos
