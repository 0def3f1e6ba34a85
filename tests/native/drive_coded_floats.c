/* The same without digits: on processors that do not multiply 8-bit integers. */

#define WITHOUT_DIGITS
#include "drive_coded.c"
