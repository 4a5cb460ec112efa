// A function that python/eagle_kernels/library.py calls with ctypes: a binding would be bound to one
// Python.
#pragma once

#define EAGLE_KERNELS_EXPORT extern "C" __attribute__((visibility("default")))
