/* python.exe: the wheels that Windows' Python comes from here have its library, and no program. */
#include <wchar.h>

__declspec(dllimport) int Py_Main(int, wchar_t **);

int wmain(int argc, wchar_t **argv) { return Py_Main(argc, argv); }
