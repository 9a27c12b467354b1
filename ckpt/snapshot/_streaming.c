/* Copying past the cache: streaming stores write whole lines without reading them first.
 *
 * A plain copy moves every destination line twice, in and out again; for a snapshot, which nobody on this core
 * reads soon, that is a third of the memory traffic for nothing. glibc's memmove streams only above a threshold
 * of most of the last-level cache (192 MiB on some machines), which no single tensor reaches.
 *
 * Only the limited C API is used, so one build serves every Python from 3.11 on. Building it is optional: without
 * it the copy is torch's.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

#define LINE_NBYTES 64
#define AHEAD_NBYTES 512 /* the next lines are asked for while these are copied */

static void stream(char *to, const char *from, size_t nbytes)
{
    size_t head = (size_t)(-(uintptr_t)to) & (LINE_NBYTES - 1);
    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    to += head;
    from += head;
    nbytes -= head;
    for (; nbytes >= LINE_NBYTES; nbytes -= LINE_NBYTES, to += LINE_NBYTES, from += LINE_NBYTES) {
        _mm_prefetch(from + AHEAD_NBYTES, _MM_HINT_NTA); /* may point behind the source: a hint never faults */
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    _mm_sfence(); /* what is announced after this call is there for every other processor */
    memcpy(to, from, nbytes);
}
#endif

static PyObject *copy(PyObject *module, PyObject *args)
{
    unsigned long long to, from;
    Py_ssize_t nbytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKn:copy", &to, &from, &nbytes))
        return NULL;
    if (nbytes < 0) {
        PyErr_Format(PyExc_ValueError, "copy: %zd bytes", nbytes);
        return NULL;
    }
#if defined(__x86_64__)
    PyThreadState *thread = PyEval_SaveThread();
    stream((char *)(uintptr_t)to, (const char *)(uintptr_t)from, (size_t)nbytes);
    PyEval_RestoreThread(thread);
#endif
    Py_RETURN_NONE;
}

static int refuse_other_processors(PyObject *module)
{
    (void)module;
#if defined(__x86_64__)
    return 0;
#else
    PyErr_SetString(PyExc_ImportError, "streaming stores are written for x86-64 only");
    return -1;
#endif
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
     "copy(to, from, nbytes): copy between two addresses that do not overlap, past the cache; the GIL is released."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, refuse_other_processors}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_streaming",
    .m_doc = "Copying past the cache.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__streaming(void)
{
    return PyModuleDef_Init(&definition);
}
