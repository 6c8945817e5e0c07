use pointsman_workers::{Booking, BookingRequest, Leg, ModelName, Registry, WorkerSpec};
use prefix_index::Prefix;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use super::*;

/// More than two chunks of ranks.
const WORKERS: usize = 150;

fn booking_request(random: &mut SmallRng, leg: Leg) -> BookingRequest {
    let prompt_tokens = random.random_range(1..500);
    BookingRequest::new(leg, Prefix::default(), prompt_tokens, 16)
}

/// Returns whether the columns have the same values as the ranks when each is asked alone.
fn check(load: &Load, pool: &Pool, rows: &[u32]) {
    for row in rows {
        let (row, own) = (*row as usize, pool[*row as usize].load());
        let wanted = [own.active_requests(), own.active_prefill_tokens(), own.decode_blocks()];
        assert_eq!([load.requests[row], load.prefill_tokens[row], load.blocks[row]], wanted, "row {row}");
    }
}

#[test]
fn load_that_is_kept_equals_load_that_is_read() {
    let registry = Registry::default();
    let join = |id: usize| {
        let flag = format!("id={id},role=aggregated,engine=vllm,model=m,url=http://h{id}");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
    };
    (0..WORKERS).for_each(join);
    let (mut random, mut load) = (SmallRng::seed_from_u64(3), Load::default());
    let mut bookings: Vec<Booking> = Vec::new();
    for step in 0..3_000 {
        if step % 500 == 499 {
            join(WORKERS + step);
        }
        let snapshot = registry.snapshot();
        let pool = snapshot.pool(&ModelName::new("m"), Leg::Aggregated);
        let worker = &pool[random.random_range(0..pool.len())];
        match random.random_range(0..5) {
            0 | 1 => bookings.push(worker.book(&booking_request(&mut random, Leg::Aggregated))),
            2 if !bookings.is_empty() => drop(bookings.swap_remove(random.random_range(0..bookings.len()))),
            3 => bookings.iter_mut().take(3).for_each(|booking| booking.prefill_done()),
            _ => bookings.iter_mut().rev().take(2).for_each(|booking| {
                booking.output_tokens(random.random_range(0..400));
            }),
        }
        // All rows, nearly all of them, and a few.
        let all = 0..u32::try_from(pool.len()).unwrap();
        let rows: Vec<u32> = match step % 3 {
            0 => all.collect(),
            1 => all.filter(|row| row % 10 > 0).collect(),
            _ => all.filter(|row| row % 10 == 0).collect(),
        };
        load.read(pool, &rows);
        check(&load, pool, &rows);
    }
}
