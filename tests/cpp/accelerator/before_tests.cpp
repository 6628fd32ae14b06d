#include "accelerator/load.h"

void beforeTests();  // see catch_main.cpp
void beforeTests() { simulated::load(); }
