// The namespace of CuPy's complex numbers, without the rest of Thrust.
#pragma once

#define THRUST_NAMESPACE_BEGIN namespace thrust {
#define THRUST_NAMESPACE_END }
#define THRUST_NS_QUALIFIER ::thrust
