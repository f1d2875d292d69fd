/* The Python module: arguments are integers (pointers among them) and floats, checked in cpu/; the GIL is released. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "kernels.h"
#include "landing.h"

/* Reads `format`, a letter an argument, i for int64_t and d for double, into what follows. 0, with an exception set, if
 * it fails. */
static int read_arguments(PyObject *const *args, Py_ssize_t count, const char *format, ...)
{
    va_list to;
    if (count != (Py_ssize_t)strlen(format)) {
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", (Py_ssize_t)strlen(format), count);
        return 0;
    }
    va_start(to, format);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (format[i] == 'i')
            *va_arg(to, int64_t *) = PyLong_AsLongLong(args[i]);
        else
            *va_arg(to, double *) = PyFloat_AsDouble(args[i]);
        if (PyErr_Occurred()) {
            va_end(to);
            return 0;
        }
    }
    va_end(to);
    return 1;
}

#define METHOD(name) static PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t count)
#define READ(...)                                        \
    (void)self;                                          \
    if (!read_arguments(args, count, __VA_ARGS__))       \
        return NULL

static PyObject *refused(const char *reason)
{
    PyErr_SetString(PyExc_ValueError, reason);
    return NULL;
}

METHOD(families)
{
    READ("");
    PyObject *names = PyList_New(0);
    for (const char *const *name = kernel_names(); names && *name; name++) {
        PyObject *text = PyUnicode_FromString(*name);
        if (!text || PyList_Append(names, text) < 0)
            Py_CLEAR(names);
        Py_XDECREF(text);
    }
    return names;
}

METHOD(processor)
{
    READ("");
    return PyUnicode_FromString(processor());
}

static PyObject *py_find(PyObject *self, PyObject *name)
{
    (void)self;
    const char *text = PyUnicode_AsUTF8(name);
    if (!text)
        return NULL;
    const kernels_t *kernels = find_kernels(text);
    if (!kernels)
        return refused("this machine has no such instruction family");
    return PyLong_FromVoidPtr((void *)kernels);
}

METHOD(set_threads)
{
    int64_t wanted;
    READ("i", &wanted);
    if (wanted < 1)
        return refused("there is at least one thread");
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = set_threads(wanted);
    Py_END_ALLOW_THREADS
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

METHOD(num_threads)
{
    READ("");
    return PyLong_FromLongLong(num_threads());
}

METHOD(linear)
{
    int64_t k, w, epilogue, rows, x, x_stride, y, y_stride;
    READ("iiiiiiii", &k, &w, &epilogue, &rows, &x, &x_stride, &y, &y_stride);
    const linear_t *weights = (const linear_t *)w;
    Py_BEGIN_ALLOW_THREADS
    ((const kernels_t *)k)->linear(weights, (enum epilogue)epilogue, rows, (const void *)x, x_stride, (void *)y,
                                   y_stride, 0, (weights->out + PANEL - 1) / PANEL, NULL);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(rms_norm)
{
    int64_t k, dtype, x, weight, y, width, rows;
    double eps;
    READ("iiiidiii", &k, &dtype, &x, &weight, &eps, &y, &width, &rows);
    Py_BEGIN_ALLOW_THREADS
    ((const kernels_t *)k)->rms_norm((enum dtype)dtype, dtype == F32, (const void *)x, NULL, (const float *)weight, eps,
                                     (void *)y, width, width, 0, rows);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(rope_write)
{
    int64_t k, m, s, layer, q_norm, k_norm, qkv, stride;
    READ("iiiiiiii", &k, &m, &s, &layer, &q_norm, &k_norm, &qkv, &stride);
    const step_t *step = (const step_t *)s;
    Py_BEGIN_ALLOW_THREADS
    ((const kernels_t *)k)->rope_write((const model_t *)m, step, layer, (const float *)q_norm, (const float *)k_norm,
                                       (void *)qkv, stride, 0, step->num_tokens);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(attention)
{
    int64_t k, m, s, layer, q, q_stride, out, out_stride, scratch;
    READ("iiiiiiiii", &k, &m, &s, &layer, &q, &q_stride, &out, &out_stride, &scratch);
    const model_t *model = (const model_t *)m;
    const step_t *step = (const step_t *)s;
    Py_BEGIN_ALLOW_THREADS
    ((const kernels_t *)k)->attention(model, step, layer, (const void *)q, q_stride, (void *)out, out_stride,
                                      (void *)scratch, 0, attention_items(model, step));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(attention_scratch)
{
    int64_t m;
    READ("i", &m);
    return PyLong_FromLongLong(attention_scratch((const model_t *)m));
}

METHOD(scratch_bytes)
{
    int64_t m, tokens;
    READ("ii", &m, &tokens);
    return PyLong_FromLongLong(scratch_bytes((const model_t *)m, tokens));
}

METHOD(check_step)
{
    int64_t m, s;
    READ("ii", &m, &s);
    const char *wrong = check_step((const model_t *)m, (const step_t *)s);
    if (wrong)
        return refused(wrong);
    Py_RETURN_NONE;
}

METHOD(forward)
{
    int64_t k, m, s;
    READ("iii", &k, &m, &s);
    const char *wrong;
    Py_BEGIN_ALLOW_THREADS
    wrong = check_step((const model_t *)m, (const step_t *)s);
    if (!wrong)
        forward((const kernels_t *)k, (const model_t *)m, (const step_t *)s);
    Py_END_ALLOW_THREADS
    if (wrong)
        return refused(wrong);
    Py_RETURN_NONE;
}

METHOD(argmax)
{
    int64_t k, logits, vocab, rows;
    READ("iiii", &k, &logits, &vocab, &rows);
    int64_t *ids = PyMem_New(int64_t, rows);
    if (!ids)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    ((const kernels_t *)k)->argmax((const float *)logits, vocab, ids, 0, rows);
    Py_END_ALLOW_THREADS
    PyObject *list = PyList_New(rows);
    for (int64_t i = 0; list && i < rows; i++) {
        PyObject *id = PyLong_FromLongLong(ids[i]);
        if (!id)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, id);
    }
    PyMem_Free(ids);
    return list;
}

METHOD(draw)
{
    int64_t logits, vocab, token_id = 0;
    draw_t params;
    READ("iididdd", &logits, &vocab, &params.temperature, &params.top_k, &params.top_p, &params.min_p, &params.random);
    const char *wrong;
    Py_BEGIN_ALLOW_THREADS
    wrong = draw((const float *)logits, vocab, &params, &token_id);
    Py_END_ALLOW_THREADS
    return wrong ? refused(wrong) : PyLong_FromLongLong(token_id);
}

METHOD(log_probability)
{
    int64_t logits, vocab, token_id, rank = 0;
    double logprob = 0.0, log_total = 0.0;
    READ("iii", &logits, &vocab, &token_id);
    if (token_id < 0 || token_id >= vocab)
        return refused("the token is outside the vocabulary");
    const char *wrong;
    Py_BEGIN_ALLOW_THREADS
    wrong = log_probability((const float *)logits, vocab, token_id, &logprob, &log_total, &rank);
    Py_END_ALLOW_THREADS
    return wrong ? refused(wrong) : Py_BuildValue("ddL", logprob, log_total, (long long)rank);
}

METHOD(first_tokens)
{
    int64_t logits, vocab, wanted, ids;
    READ("iiii", &logits, &vocab, &wanted, &ids);
    if (wanted < 1 || wanted > vocab)
        return refused("more tokens than the vocabulary has");
    Py_BEGIN_ALLOW_THREADS
    first_tokens((const float *)logits, vocab, wanted, (int64_t *)ids);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

METHOD(read_bandwidth)
{
    int64_t memory, bytes;
    double found;
    READ("ii", &memory, &bytes);
    Py_BEGIN_ALLOW_THREADS
    found = read_bandwidth((const void *)memory, bytes);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(found);
}

METHOD(digest)
{
    int64_t from, bytes;
    READ("ii", &from, &bytes);
    if (bytes < DIGEST_MIN)
        return refused("too few bytes for this digest");
    uint8_t out[DIGEST_BYTES];
    Py_BEGIN_ALLOW_THREADS
    digest((const void *)from, bytes, out);
    Py_END_ALLOW_THREADS
    return PyBytes_FromStringAndSize((const char *)out, DIGEST_BYTES);
}

METHOD(copy_digest)
{
    int64_t from, to, bytes;
    READ("iii", &from, &to, &bytes);
    if (bytes < DIGEST_MIN)
        return refused("too few bytes for this digest");
    uint8_t out[DIGEST_BYTES];
    Py_BEGIN_ALLOW_THREADS
    copy_digest((const void *)from, (void *)to, bytes, out);
    Py_END_ALLOW_THREADS
    return PyBytes_FromStringAndSize((const char *)out, DIGEST_BYTES);
}

METHOD(convert_rows)
{
    int64_t rows;
    READ("i", &rows);
    Py_BEGIN_ALLOW_THREADS
    convert_rows((const rows_t *)rows);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#define ENTRY(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    ENTRY(families),
    ENTRY(processor),
    {"find", py_find, METH_O, NULL},
    ENTRY(set_threads),
    ENTRY(num_threads),
    ENTRY(linear),
    ENTRY(rms_norm),
    ENTRY(rope_write),
    ENTRY(attention),
    ENTRY(attention_scratch),
    ENTRY(scratch_bytes),
    ENTRY(check_step),
    ENTRY(forward),
    ENTRY(argmax),
    ENTRY(draw),
    ENTRY(log_probability),
    ENTRY(first_tokens),
    ENTRY(read_bandwidth),
    ENTRY(digest),
    ENTRY(copy_digest),
    ENTRY(convert_rows),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Kernels in C. See the README of the room.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
