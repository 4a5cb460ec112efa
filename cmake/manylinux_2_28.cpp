// Symbols that a compiler newer than manylinux_2_28 (glibc 2.28, GCC 8) would take from the machine's libraries,
// defined here so that every build loads on every such machine. The headers of libstdc++ declare these members as
// instantiated in the library, but GCC 8's does not have them. libstdc++ itself stays shared, because exceptions cross
// into libtorch.
#include <new>
#include <sstream>

// GLIBCXX_3.4.26 and 3.4.29.
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;

// GLIBCXX_3.4.29: thrown by a std::vector that is asked for more bytes than there are addresses.
void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// GLIBC_2.32: libstdc++ skips atomic reference counts where it is set, in a process of one thread. With torch there
// are more.
// In braces, because GCC warns of an extern declaration that has a value.
extern "C" {
char __libc_single_threaded = 0;
}
