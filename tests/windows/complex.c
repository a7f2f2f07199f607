/* The functions of complex numbers that Windows' C library has and wine 8's stops at: numpy computes with them.

   Microsoft's complex numbers are structures, and its long double is a double. The library's names are given to these
   by the list of exports (libraries.py), as a compiler keeps them to itself. */
#include <complex.h>

typedef struct { double v[2]; } D;
typedef struct { float v[2]; } F;

static double complex of_d(D a) { return a.v[0] + I * a.v[1]; }
static float complex of_f(F a) { return a.v[0] + I * a.v[1]; }
static D to_d(double complex a) { return (D){{__real__ a, __imag__ a}}; }
static F to_f(float complex a) { return (F){{__real__ a, __imag__ a}}; }

#define PART(name)                                         \
    double my_##name(D a) { return name(of_d(a)); }        \
    double my_##name##l(D a) { return name(of_d(a)); }     \
    float my_##name##f(F a) { return name##f(of_f(a)); }
#define FUNCTION(name)                                     \
    D my_##name(D a) { return to_d(name(of_d(a))); }       \
    D my_##name##l(D a) { return to_d(name(of_d(a))); }    \
    F my_##name##f(F a) { return to_f(name##f(of_f(a))); }

PART(creal)
PART(cimag)
PART(cabs)
PART(carg)
FUNCTION(cexp)
FUNCTION(csin)
FUNCTION(ccos)
FUNCTION(ctan)
FUNCTION(csinh)
FUNCTION(ccosh)
FUNCTION(ctanh)
D my_cpow(D a, D b) { return to_d(cpow(of_d(a), of_d(b))); }
D my_cpowl(D a, D b) { return to_d(cpow(of_d(a), of_d(b))); }
F my_cpowf(F a, F b) { return to_f(cpowf(of_f(a), of_f(b))); }
