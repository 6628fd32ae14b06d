@0xb0c5bc14cbd28721;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("compare");

interface Calls {
  echo @0 (value :Int64) -> (value :Int64);
  echoBytes @1 (value :Data) -> (value :Data);
  echoNumbers @2 (values :List(Float64)) -> (values :List(Float64));
  makeCounter @3 (start :Int64) -> (counter :Counter);
}

interface Counter {
  add @0 (number :Int64) -> (value :Int64);
}
