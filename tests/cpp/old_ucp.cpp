// Stands for a UCX that is too old: a library of its own, not a part of the tests.

extern "C" void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1;
  *minor = 16;
  *release = 0;
}
