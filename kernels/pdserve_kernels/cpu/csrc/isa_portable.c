/* Any machine for which there is a compiler. */
#define PD_TABLE kernels_portable
#define PD_NAME "portable"
#include "isa.inc"
