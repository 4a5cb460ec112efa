// Where csrc/cuda looks for libtorch_cuda.so it finds the emulated one (runtime.cpp).
#pragma once

#include_next <dlfcn.h>

extern "C" void* emulated_dlopen(const char* file, int mode);
extern "C" void* emulated_dlsym(void* library, const char* name);

#define dlopen emulated_dlopen
#define dlsym emulated_dlsym
