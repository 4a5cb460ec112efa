// A function that python/eagle_kernels/library.py calls with ctypes: a binding would be tied to one version of Python.
#pragma once

#define EAGLE_KERNELS_EXPORT extern "C" __attribute__((visibility("default")))
