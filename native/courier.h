// Tokens on their way from a step of the engine to the sockets of their streams, without the interpreter.
//
//   engine's thread                       courier's thread
//   add, add, …, go ──buffers, queue──▶   one send per stream, one after the other
//
// An errand is one stream: where to send, what opens the answer, what stands before and behind every text.
// Whoever adds writes the event into the errand's buffer, as JSON and as a chunk of HTTP; the courier's thread
// sends it. It runs while the engine plans its next step, when a core is idle, and needs no lock of Python's. Streams
// whose first token is due go before all others: somebody looks at an empty page.
//
// Owners: an errand's descriptor is its connection's; `end` returns once nobody sends to it any more, and what it
// returns is all that was added and not sent. After `end` nothing is taken: who adds then has to tell otherwise.
// An errand whose socket is full (or broken) is stuck: a byte appears in the pipe, and its owner ends it.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace ridgeline {

// As Prometheus counts: by upper bound, at most the bound; the last is beyond all of them.
struct Observations {
  std::vector<double> bounds;
  std::vector<int64_t> counts;
  double total = 0;

  explicit Observations(std::vector<double> upper);
  void observe(double value);
  void clear();
};

// Instants are seconds on the caller's clock; 0: there was none.
struct Carried {
  int64_t num_tokens = 0;
  double first_s = 0, last_s = 0;
};

struct Errand {
  int descriptor;
  int64_t interval;  // tokens that go together; the first goes at once
  std::string head, tail;
  std::string buffer, out;  // what was added; what is being sent
  std::vector<double> at_s, out_at_s;  // when each token in them was made
  Carried carried;
  bool is_queued = false, is_sending = false, is_stuck = false, has_ended = false;
};

class Courier {
 public:
  Courier(double now_s, std::vector<double> publish_bounds, std::vector<double> gap_bounds);
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  std::shared_ptr<Errand> take(int descriptor, std::string_view opening, std::string_view head,
                               std::string_view tail, int64_t interval);
  bool add(const std::shared_ptr<Errand>& errand, std::string_view text, double at_s);
  void go();
  std::string end(Errand& errand);  // what was not sent
  Carried seen(const Errand& errand);
  bool is_stuck(const Errand& errand);
  int pipe_descriptor() const { return pipe_[0]; }

  struct Counts {
    int64_t num_tokens;
    Observations publish, gaps;
  };
  Counts drain();

 private:
  void run();
  std::shared_ptr<Errand> next();
  void deliver(Errand& errand, std::unique_lock<std::mutex>& lock);
  void account(Errand& errand, std::vector<double>& at_s);
  double now_s() const;

  const double offset_s_;  // from our clock to the caller's
  int pipe_[2];
  std::mutex mutex_;
  std::condition_variable due_, done_;
  std::deque<std::shared_ptr<Errand>> firsts_, queue_;
  int64_t num_tokens_ = 0;
  Observations publish_, gaps_;
  bool has_gone_ = false, is_over_ = false;
  std::thread thread_;
};

// The text as msgspec writes it in JSON, quotes and all.
void append_json(std::string& to, std::string_view text);

}  // namespace ridgeline
