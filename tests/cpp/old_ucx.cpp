// Stands for libucp and for libucs of a UCX that is too old. They are libraries of their own, not a part of the tests.

extern "C" void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1;
  *minor = 16;
  *release = 0;
}
