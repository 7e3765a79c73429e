// Many small writes to many sockets with the interpreter's lock given up once, and those of a courier without it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <cerrno>
#include <vector>

#include "courier.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // where a socket option says it
#endif

namespace nb = nanobind;

namespace ridgeline {
namespace {

struct Piece {
  int descriptor;
  const char* data;
  size_t size;
};

long send_one(const Piece& piece) {
  ssize_t sent;
  do {
    sent = ::send(piece.descriptor, piece.data, piece.size, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? -static_cast<long>(errno) : static_cast<long>(sent);
}

// A tuple of (descriptor, bytes): it cannot change while the lock is not held.
std::vector<long> send_each(nb::tuple pairs) {
  std::vector<Piece> pieces;
  pieces.reserve(pairs.size());
  for (nb::handle each : pairs) {
    nb::tuple pair = nb::cast<nb::tuple>(each);
    nb::bytes data = nb::cast<nb::bytes>(pair[1]);
    pieces.push_back({nb::cast<int>(pair[0]), data.c_str(), data.size()});
  }
  std::vector<long> sent;
  sent.reserve(pieces.size());
  nb::gil_scoped_release release;
  for (const Piece& piece : pieces) sent.push_back(send_one(piece));
  return sent;
}

// An errand and the courier that runs it, which lives as long as any of its errands.
struct BoundErrand {
  std::shared_ptr<Courier> courier;
  std::shared_ptr<Errand> errand;
};

std::string_view view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

BoundErrand take(const std::shared_ptr<Courier>& courier, int descriptor, nb::bytes opening, nb::bytes head,
                 nb::bytes tail, int64_t interval) {
  return {courier, courier->take(descriptor, view(opening), view(head), view(tail), interval)};
}

bool add(BoundErrand& self, nb::handle text, double at_s) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!data) {  // no text that JSON could hold
    PyErr_Clear();
    return self.courier->add(self.errand, "\xef\xbf\xbd", at_s);
  }
  return self.courier->add(self.errand, {data, static_cast<size_t>(size)}, at_s);
}

nb::bytes end(BoundErrand& self) {
  std::string left;
  {
    nb::gil_scoped_release release;
    left = self.courier->end(*self.errand);
  }
  return nb::bytes(left.data(), left.size());
}

nb::tuple seen(BoundErrand& self) {
  const Carried carried = self.courier->seen(*self.errand);
  return nb::make_tuple(carried.num_tokens, carried.first_s, carried.last_s);
}

nb::tuple drain(Courier& courier) {
  const Courier::Counts counts = courier.drain();
  return nb::make_tuple(counts.num_tokens, counts.publish.counts, counts.publish.total, counts.gaps.counts,
                        counts.gaps.total);
}

void bind_courier(nb::module_& m) {
  nb::class_<BoundErrand>(m, "Errand", "One stream, from the engine's thread to its socket.")
      .def("add", &add, nb::arg("text"), nb::arg("at_s"),
           "A token made at `at_s`; False where the errand has ended. `go` sends what is due.")
      .def("go", [](BoundErrand& self) { self.courier->go(); }, "Wake the courier, for all of its errands.")
      .def("end", &end, "What was added and not sent; from now on nothing is taken, and nobody sends.")
      .def("seen", &seen, "(tokens handed over, instant of the first, of the last).")
      .def_prop_ro("is_stuck", [](BoundErrand& self) { return self.courier->is_stuck(*self.errand); });
  nb::class_<Courier>(m, "Courier", "A thread that sends the tokens of many streams.")
      .def(nb::init<double, std::vector<double>, std::vector<double>>(), nb::arg("now_s"),
           nb::arg("publish_bounds"), nb::arg("gap_bounds"))
      .def("take", &take, nb::arg("descriptor"), nb::arg("opening"), nb::arg("head"), nb::arg("tail"),
           nb::arg("interval"),
           "A new errand: `opening` goes with its first token, every text between `head` and `tail`, as a chunk.")
      .def("drain", &drain, "(tokens, publish counts and total, gap counts and total) since the last call.")
      .def_prop_ro("pipe", &Courier::pipe_descriptor, "Readable when an errand is stuck.");
}

}  // namespace

void bind_sockets(nb::module_& m) {
  bind_courier(m);
  m.def("send_each", &send_each, nb::arg("pairs"),
        "Send to every (descriptor, bytes) what its socket takes now: bytes sent, or -errno.");
}

}  // namespace ridgeline
