use proptest::prelude::*;

use super::*;

type Message = Vec<u8>;

fn sequencer() -> Sequencer<Message> {
    Sequencer::new(4, 1000)
}

fn m(seq: u64) -> Message {
    seq.to_be_bytes().to_vec()
}

/// A sequencer that has applied 0 and sees 3.
fn with_a_gap() -> Sequencer<Message> {
    let mut sequencer = sequencer();
    assert_eq!(sequencer.on(0, m(0)), Step::Apply(m(0)));
    assert_eq!(sequencer.on(3, m(3)), Step::Gap { from: 1, to: 2 });
    sequencer
}

#[test]
fn h6_the_first_message_may_have_any_number() {
    let mut sequencer = sequencer();
    assert_eq!(sequencer.on(41, m(41)), Step::Apply(m(41)));
    assert_eq!(sequencer.on(42, m(42)), Step::Apply(m(42)));
    assert_eq!(sequencer.on(42, m(42)), Step::Duplicate);
}

#[test]
fn h6_a_replay_fills_in_order_and_live_messages_follow() {
    let mut sequencer = with_a_gap();
    assert_eq!(sequencer.on(4, m(4)), Step::Kept);
    for (seq, step) in
        [(0, Step::Duplicate), (1, Step::Apply(m(1))), (2, Step::Apply(m(2))), (3, Step::Apply(m(3)))]
    {
        assert_eq!(sequencer.replayed(seq, m(seq)), step);
    }
    assert_eq!(sequencer.finish(), [Step::Duplicate, Step::Apply(m(4))]);
    assert_eq!(sequencer.on(5, m(5)), Step::Apply(m(5)));
}

#[test]
fn h6_a_replay_ahead_of_the_live_messages_is_not_a_restart() {
    let mut sequencer = with_a_gap();
    for seq in 1..=6 {
        assert_eq!(sequencer.replayed(seq, m(seq)), Step::Apply(m(seq)));
    }
    assert_eq!(sequencer.finish(), [Step::Duplicate]);
    for seq in 4..=6 {
        assert_eq!(sequencer.on(seq, m(seq)), Step::Duplicate);
    }
    assert_eq!(sequencer.on(7, m(7)), Step::Apply(m(7)));
}

#[test]
fn h6_an_unfilled_gap_is_lost_and_later_messages_continue() {
    let mut sequencer = with_a_gap();
    assert_eq!(sequencer.replayed(1, m(1)), Step::Apply(m(1)));
    assert_eq!(sequencer.finish(), [Step::Lost(m(3))]);
    assert_eq!(sequencer.replayed(2, m(2)), Step::Duplicate);
    assert_eq!(sequencer.on(4, m(4)), Step::Apply(m(4)));
}

#[test]
fn h6_kept_messages_advance_to_the_next_gap() {
    let mut sequencer = with_a_gap();
    for seq in [4, 6] {
        assert_eq!(sequencer.on(seq, m(seq)), Step::Kept);
    }
    assert_eq!((sequencer.next(), sequencer.advance()), (Some(1), None));
    for seq in [1, 2] {
        assert_eq!(sequencer.replayed(seq, m(seq)), Step::Apply(m(seq)));
    }
    assert_eq!(sequencer.advance(), Some(Step::Apply(m(3))));
    assert_eq!(sequencer.advance(), Some(Step::Apply(m(4))));
    // H6.19
    assert_eq!((sequencer.next(), sequencer.advance(), sequencer.is_caught_up()), (Some(5), None, false));
    assert_eq!(sequencer.replayed(5, m(5)), Step::Apply(m(5)));
    assert_eq!(sequencer.advance(), Some(Step::Apply(m(6))));
    assert!(sequencer.is_open() && sequencer.is_caught_up());
    assert_eq!(sequencer.finish(), []);
    assert_eq!(sequencer.on(7, m(7)), Step::Apply(m(7)));
}

#[test]
fn h6_a_gap_within_a_replay_is_lost() {
    let mut sequencer = with_a_gap();
    assert_eq!(sequencer.replayed(2, m(2)), Step::Lost(m(2)));
    assert_eq!(sequencer.finish(), [Step::Apply(m(3))]);
}

#[test]
fn h6_falling_numbers_are_a_restart() {
    let mut sequencer = with_a_gap();
    assert_eq!(sequencer.on(0, m(0)), Step::Restarted(m(0)));
    assert!(!sequencer.is_open());
    assert_eq!(sequencer.on(1, m(1)), Step::Apply(m(1)));
    assert_eq!(sequencer.reset(), Some(1));
    assert_eq!(sequencer.on(0, m(0)), Step::Apply(m(0)));
}

#[test]
fn h6_kept_messages_are_bounded() {
    let mut sequencer = with_a_gap();
    for seq in 4..20 {
        assert_eq!(sequencer.on(seq, m(seq)), Step::Kept);
    }
    assert_eq!(
        sequencer.finish(),
        [Step::Lost(m(16)), Step::Apply(m(17)), Step::Apply(m(18)), Step::Apply(m(19))]
    );
    let mut by_bytes: Sequencer<Message> = Sequencer::new(100, 20);
    by_bytes.open();
    for seq in 0..10 {
        assert_eq!(by_bytes.on(seq, m(seq)), Step::Kept);
    }
    assert_eq!(by_bytes.finish(), [Step::Apply(m(8)), Step::Apply(m(9))]);
}

#[test]
fn h6_the_last_numbers_do_not_overflow() {
    let mut sequencer = sequencer();
    assert_eq!(sequencer.on(u64::MAX, m(1)), Step::Apply(m(1)));
    assert_eq!(sequencer.on(0, m(0)), Step::Restarted(m(0)));
    assert_eq!(sequencer.on(u64::MAX, m(2)), Step::Gap { from: 1, to: u64::MAX - 1 });
}

/// Something that happens to the next message between the engine and the sequencer.
#[derive(Clone, Debug)]
enum Act {
    Deliver,
    Drop,
    Repeat,
    /// The engine starts over behind a proxy: the same connection, numbers from 0.
    Restart,
    /// The engine or the network goes, and comes back as another connection.
    Reconnect {
        restarted: bool,
    },
    /// The open replay delivers `count` messages, starting with `from`, of those that existed when it was
    /// requested.
    Replay {
        skip: u64,
        count: u64,
    },
    Advance,
    Finish,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => Just(Act::Deliver),
        3 => Just(Act::Drop),
        1 => Just(Act::Repeat),
        1 => Just(Act::Restart),
        1 => any::<bool>().prop_map(|restarted| Act::Reconnect { restarted }),
        4 => (0..2_u64, 0..8_u64).prop_map(|(skip, count)| Act::Replay { skip, count }),
        2 => Just(Act::Advance),
        2 => Just(Act::Finish),
    ]
}

/// A connection to an engine. `trace` has the events that the index would see.
struct World {
    sequencer: Sequencer<Message>,
    life: u64,
    next: u64,
    last: Option<u64>,
    replay_at: u64,
    /// The run since the last forget: (life, number) of its last message.
    run: Option<(u64, u64)>,
}

impl World {
    fn message(&self, seq: u64) -> Message {
        [self.life.to_be_bytes(), seq.to_be_bytes()].concat()
    }

    fn take(&mut self, step: Step<Message>) {
        let message = match step {
            Step::Apply(message) => message,
            Step::Restarted(message) | Step::Lost(message) => {
                self.run = None;
                message
            }
            Step::Gap { from, to } => {
                assert!(from <= to);
                assert_eq!(self.run.map(|(_, seq)| seq + 1), Some(from));
                self.replay_at = from;
                return;
            }
            Step::Duplicate | Step::Kept => return,
        };
        let number = |at: usize| u64::from_be_bytes(message[at..at + 8].try_into().expect("8 bytes"));
        let (life, seq) = (number(0), number(8));
        if let Some((before, last)) = self.run {
            assert_eq!((before, last + 1), (life, seq), "applied out of order or across a gap");
        }
        self.run = Some((life, seq));
    }

    fn deliver(&mut self, seq: u64) {
        self.last = Some(seq);
        let step = self.sequencer.on(seq, self.message(seq));
        self.take(step);
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Deliver => {
                self.deliver(self.next);
                self.next += 1;
            }
            Act::Drop => self.next += 1,
            Act::Repeat => {
                if let Some(last) = self.last {
                    self.deliver(last);
                }
            }
            // A restart is seen on the same connection only by a number that goes back.
            Act::Restart if self.last.is_some_and(|last| last > 0) => {
                self.life += 1;
                self.next = 1;
                self.deliver(0);
            }
            Act::Restart => {}
            Act::Reconnect { restarted } => {
                self.sequencer.reset();
                (self.run, self.last) = (None, None);
                if restarted {
                    (self.life, self.next) = (self.life + 1, 0);
                }
                self.sequencer.open();
                self.replay_at = 0;
            }
            Act::Replay { skip, count } => {
                let from = self.replay_at + skip;
                for seq in from..(from + count).min(self.next) {
                    let step = self.sequencer.replayed(seq, self.message(seq));
                    self.take(step);
                }
                self.replay_at = (from + count).min(self.next).max(self.replay_at);
            }
            Act::Advance => {
                while let Some(step) = self.sequencer.advance() {
                    self.take(step);
                }
            }
            Act::Finish => {
                for step in self.sequencer.finish() {
                    self.take(step);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn h6_nothing_is_applied_out_of_order_or_across_a_gap(acts in prop::collection::vec(act(), 0..80)) {
        let mut world =
            World { sequencer: sequencer(), life: 0, next: 0, last: None, replay_at: 0, run: None };
        for act in acts {
            world.act(act);
        }
        // The line always heals: after a forget at worst, what comes is applied.
        world.act(Act::Finish);
        world.act(Act::Deliver);
        world.act(Act::Finish);
        prop_assert_eq!(world.run, Some((world.life, world.next - 1)));
    }
}
