use prefix_index::{Prefix, Salt};
use proptest::prelude::*;

use super::*;
use crate::{
    BookingRequest, Health, Leg, LoadValues, ModelName, Registry, WorkerSpec,
    booking::{Booking, RemoteBooking},
};

const WORKERS: u64 = 5;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The worker joins, or is replaced by one with another description.
    Join(u64, u32),
    Leave(u64),
    Book {
        row: usize,
        prompt: u32,
        tokens: u32,
        reuse: bool,
    },
    BookRemotely {
        row: usize,
        prompt: u32,
        tokens: u32,
        shared: bool,
    },
    Output(usize, u32),
    FirstToken(usize),
    End(usize),
    EndRemote(usize),
    Health(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let row = 0_usize..40;
    prop_oneof![
        (1..=WORKERS, 1_u32..30).prop_map(|(id, ranks)| Step::Join(id, ranks)),
        (1..=WORKERS).prop_map(Step::Leave),
        (row.clone(), 0_u32..6, 1_u32..100, any::<bool>())
            .prop_map(|(row, prompt, tokens, reuse)| Step::Book { row, prompt, tokens, reuse }),
        (row.clone(), 0_u32..6, 1_u32..100, any::<bool>())
            .prop_map(|(row, prompt, tokens, shared)| Step::BookRemotely { row, prompt, tokens, shared }),
        (row.clone(), 0_u32..200).prop_map(|(which, tokens)| Step::Output(which, tokens)),
        row.clone().prop_map(Step::FirstToken),
        row.clone().prop_map(Step::End),
        row.clone().prop_map(Step::EndRemote),
        (row, any::<bool>()).prop_map(|(row, healthy)| Step::Health(row, healthy)),
    ]
}

fn prefix(prompt: u32, tokens: u32) -> Prefix {
    let tokens: Vec<u32> = (0..tokens).map(|place| prompt * 1_000 + place).collect();
    Prefix::of_tokens(&tokens, 4, &Salt::default(), &[])
}

fn request(prompt: u32, tokens: u32, reuse: bool) -> BookingRequest {
    BookingRequest {
        assume_kv_reuse: reuse,
        ..BookingRequest::new(Leg::Decode, prefix(prompt, tokens), tokens, 4)
    }
}

/// The bookings that live, each with its rank's load, which outlives its worker.
#[derive(Default)]
struct Held {
    own: Vec<(Candidate, u32, Booking)>,
    remote: Vec<(Candidate, u32, RemoteBooking)>,
}

impl Held {
    fn make(&mut self, step: Step, registry: &Registry, pool: &Pool) {
        let chosen = |row: usize| (!pool.is_empty()).then(|| pool[row % pool.len()].clone());
        match step {
            Step::Join(id, ranks) => {
                let flag =
                    format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m,dp_size={ranks}");
                registry.upsert(WorkerSpec::parse_flag(&flag).unwrap()).set_health(Health::Healthy);
            }
            Step::Leave(id) => drop(registry.remove(WorkerId(id))),
            Step::Book { row, prompt, tokens, reuse } => {
                let Some(candidate) = chosen(row) else { return };
                let booking = candidate.book(&request(prompt, tokens, reuse));
                self.own.push((candidate, tokens, booking));
            }
            Step::BookRemotely { row, prompt, tokens, shared } => {
                let Some(candidate) = chosen(row) else { return };
                let values = LoadValues { prefill_tokens: tokens, unnamed_millis: 700 };
                let blocks = shared.then(|| prefix(prompt, tokens));
                let booking = candidate.worker.book_remote(candidate.rank, blocks, values).unwrap();
                self.remote.push((candidate, tokens, booking));
            }
            Step::Output(which, tokens) => {
                if let Some((_, _, booking)) = self.own.get_mut(which) {
                    booking.output_tokens(tokens);
                }
            }
            Step::FirstToken(which) => {
                if let Some((_, tokens, booking)) = self.own.get_mut(which) {
                    booking.first_token(std::time::Duration::from_millis(3), true);
                    *tokens = 0;
                }
            }
            Step::End(which) => drop((which < self.own.len()).then(|| self.own.swap_remove(which))),
            Step::EndRemote(which) => {
                drop((which < self.remote.len()).then(|| self.remote.swap_remove(which)));
            }
            Step::Health(row, healthy) => {
                let health = if healthy { Health::Healthy } else { Health::Unhealthy };
                chosen(row).map(|candidate| candidate.worker.set_health(health));
            }
        }
    }

    /// Requests and prompt tokens that live on a candidate.
    fn of(&self, candidate: &Candidate) -> (u32, u32) {
        let same = |other: &Candidate| std::ptr::eq(other.load(), candidate.load());
        let own = self.own.iter().filter(|(other, ..)| same(other)).map(|(_, tokens, _)| *tokens);
        let remote = self.remote.iter().filter(|(other, ..)| same(other)).map(|(_, tokens, _)| *tokens);
        own.chain(remote).fold((0, 0), |(requests, sum), tokens| (requests + 1, sum + tokens))
    }
}

type Figures = (u32, u32, u32, u32);

fn figures(load: RankView<'_>) -> Figures {
    (load.active_requests(), load.active_prefill_tokens(), load.decode_blocks(), load.ttft_ewma_us())
}

fn compare(pool: &Pool, held: &Held) -> Result<(), TestCaseError> {
    let rows: Vec<u32> = (0..pool.len() as u32).collect();
    let mut all: Vec<Figures> = vec![(9, 9, 9, 9); pool.len()];
    pool.for_all(&mut all, |cell, load| *cell = figures(load));
    let odd: Vec<u32> = rows.iter().copied().filter(|row| row % 3 == 1).collect();
    let mut some = Vec::new();
    pool.for_each(&odd, |row, load| some.push((row, figures(load))));
    prop_assert_eq!(some, odd.iter().map(|row| (*row, all[*row as usize])).collect::<Vec<_>>());
    let mut eligible = Vec::new();
    pool.for_each_eligibility(|row, surely| eligible.push((row, surely)));
    for (row, candidate) in rows.iter().zip(pool) {
        let found = all[*row as usize];
        prop_assert_eq!(found, figures(candidate.load().view()));
        prop_assert_eq!((found.0, found.1), held.of(candidate), "row {}", row);
        prop_assert_eq!(pool.row_of(candidate.worker_id(), candidate.rank), Some(*row));
        prop_assert_eq!(pool.ids().get(*row as usize), Some((candidate.worker_id(), candidate.rank)));
        prop_assert_eq!(eligible[*row as usize], (*row, candidate.ineligible().is_none()));
    }
    prop_assert_eq!(pool.all_surely_eligible(), eligible.iter().all(|(_, surely)| *surely));
    for prompt in 0..6 {
        let prefix = prefix(prompt, 40);
        for asked in [&rows, &odd] {
            let mut booking = Vec::new();
            pool.for_each_booking(asked, prefix.hashes()[0], |row| booking.push(row));
            prop_assert!(booking.is_sorted() && booking.iter().all(|row| asked.contains(row)));
            for row in asked.iter().filter(|row| !booking.contains(row)) {
                let load = pool[*row as usize].load();
                let (with, without) =
                    (load.blocks_after_admission(&prefix, 10, true), load.decode_blocks() + 10);
                prop_assert_eq!(with, without, "row {} shares a block", row);
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn columns_say_what_the_bookings_of_each_candidate_are(
        steps in proptest::collection::vec(step(), 1..80),
    ) {
        let (registry, model, mut held) = (Registry::default(), ModelName::new("m"), Held::default());
        let mut old = None;
        for (number, step) in steps.into_iter().enumerate() {
            let snapshot = registry.snapshot();
            held.make(step, &registry, snapshot.pool(&model, Leg::Aggregated));
            if number % 4 == 0 {
                compare(registry.snapshot().pool(&model, Leg::Aggregated), &held)?;
            }
            if number % 16 == 0 {
                // A request may hold an old snapshot.
                old = Some(snapshot);
            }
            if let Some(old) = &old {
                compare(old.pool(&model, Leg::Aggregated), &held)?;
            }
        }
        held = Held::default();
        compare(registry.snapshot().pool(&model, Leg::Aggregated), &held)?;
    }
}

fn join(registry: &Registry, id: u64) -> Candidate {
    let flag = format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m");
    let worker = registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
    worker.set_health(Health::Healthy);
    worker.candidates()[0].clone()
}

#[test]
fn a_booking_that_outlives_its_worker_counts_for_no_other_worker_and_its_position_is_free_afterwards() {
    let (registry, model) = (Registry::default(), ModelName::new("m"));
    let first = join(&registry, 1);
    let position = first.load().position().at();
    let booking = first.book(&request(1, 40, true));
    drop(first);
    registry.remove(WorkerId(1));
    let second = join(&registry, 2);
    assert_ne!(second.load().position().at(), position);
    assert_eq!(figures(second.load().view()), (0, 0, 0, 0));
    drop(booking);
    assert_eq!(figures(second.load().view()), (0, 0, 0, 0));
    let third = join(&registry, 3);
    assert_eq!((third.load().position().at(), figures(third.load().view())), (position, (0, 0, 0, 0)));
    let snapshot = registry.snapshot();
    let pool = snapshot.pool(&model, Leg::Aggregated);
    assert_eq!(pool.len(), 2);
    let mut books = Vec::new();
    pool.for_each_booking(&[0, 1], prefix(1, 40).hashes()[0], |row| books.push(row));
    assert_eq!(books, [] as [u32; 0], "the position's bits are cleared with the bookings");
}
