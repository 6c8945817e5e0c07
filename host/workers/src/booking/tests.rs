use proptest::prelude::*;

use super::*;
use crate::{columns::Columns, id::BlockHash};

fn request(prompt_tokens: u32, blocks: &[u64], reuse: bool) -> BookingRequest {
    let prefix: Vec<_> = blocks.iter().map(|block| BlockHash(*block)).collect();
    BookingRequest {
        assume_kv_reuse: reuse,
        ..BookingRequest::new(Leg::Decode, prefix.into(), prompt_tokens, 16)
    }
}

fn new_load() -> RankLoad {
    RankLoad::noted(Columns::default().allocate(1).remove(0), None)
}

fn state(load: &RankLoad) -> (u32, u32, u32) {
    (load.active_requests(), load.active_prefill_tokens(), load.decode_blocks())
}

#[test]
fn f4_a_booking_is_added_at_selection_and_released_on_drop() {
    let load = Arc::new(new_load());
    let mut booking = Booking::new(load.clone(), &request(40, &[1, 2], true));
    assert_eq!(state(&load), (1, 40, 3));
    booking.prefill_done();
    booking.prefill_done();
    assert_eq!(state(&load), (1, 0, 3));
    drop(booking);
    assert_eq!(state(&load), (0, 0, 0));
}

#[test]
fn f4_a_handle_releases_a_booking_once_and_nothing_is_booked_afterwards() {
    let load = Arc::new(new_load());
    let mut booking = Booking::new(load.clone(), &request(40, &[1, 2], true));
    let handle = booking.handle();
    assert!(booking.output_tokens(20) && booking.is_booked());
    assert_eq!(state(&load), (1, 40, 4));
    // F4.9
    assert!(handle.release());
    assert_eq!(state(&load), (0, 0, 0));
    booking.first_token(Duration::from_millis(100), true);
    assert!(!booking.output_tokens(400) && !booking.is_booked() && !handle.release());
    drop(booking);
    assert_eq!((state(&load), handle.release()), ((0, 0, 0), false));
}

#[test]
fn f4_a_request_has_no_more_blocks_than_its_rank_and_no_number_of_an_engine_overflows() {
    let load = Arc::new(new_load());
    let mut booking = Booking::new(load.clone(), &request(40, &[], true));
    booking.output_tokens(u32::MAX);
    booking.output_tokens(u32::MAX / 2);
    booking.output_tokens(20);
    // F4.12
    assert_eq!(load.decode_blocks(), 4, "nothing is known of the rank");
    load.view().set_capacity(50, 32);
    booking.output_tokens(u32::MAX);
    // F4.19
    assert_eq!(load.decode_blocks(), 100);
    booking.output_tokens(20);
    assert_eq!(load.decode_blocks(), 4);
    load.view().set_capacity(1, 16);
    booking.output_tokens(400);
    assert_eq!(load.decode_blocks(), 4, "as large as its prompt");
    drop(booking);
    assert_eq!(state(&load), (0, 0, 0));
}

#[test]
fn f4_tokens_of_one_read_tell_no_latency() {
    let load = new_load();
    load.observe_itl(Duration::ZERO);
    // F4.7
    assert_eq!((load.view().itl_ewma_us(), load.speeds.itl()), (0, Duration::from_millis(15)));
}

#[test]
fn f4_the_speed_of_prefills_is_learned_from_the_tokens_that_the_engine_reports() {
    let learned = |reported: &[(u32, Option<u32>)], computed: bool| {
        let load = Arc::new(new_load());
        let half = BookingRequest { new_prefill_tokens: 20, ..request(40, &[], true) };
        let mut booking = Booking::new(load.clone(), &half);
        reported.iter().for_each(|(tokens, cached)| booking.prompt_reported(*tokens, *cached));
        booking.first_token(Duration::from_millis(100), computed);
        load.view().prefill_us_per_ktoken()
    };
    assert_eq!(learned(&[], true), 5_000_000);
    // F4.17
    assert_eq!(learned(&[(10_000, Some(0))], true), 10_000);
    assert_eq!(learned(&[(10_000, Some(8_000))], true), 50_000);
    assert_eq!(learned(&[(10_000, None), (10_000, None)], true), 20_000, "half is expected to be cached");
    assert_eq!(learned(&[(0, None)], true), 5_000_000, "it reported no tokens");
    assert_eq!(learned(&[(10_000, Some(20_000))], true), 0, "nothing was computed");
    assert_eq!(learned(&[(10_000, Some(0))], false), 0);
}

#[test]
fn g_a_shared_prefix_counts_once_and_without_reuse_it_does_not() {
    let load = Arc::new(new_load());
    let first = Booking::new(load.clone(), &request(64, &[1, 2, 3, 4], true));
    let blocks: Vec<BlockHash> = [1, 2, 30, 40].map(BlockHash).to_vec();
    // G3.1, G3.2
    assert_eq!(load.blocks_after_admission(&blocks.clone().into(), 4, true), 6);
    // G3.3
    assert_eq!(load.blocks_after_admission(&blocks.into(), 4, false), 8);
    let second = Booking::new(load.clone(), &request(64, &[1, 2, 30, 40], true));
    // G3.2
    assert_eq!(load.decode_blocks(), 6);
    drop(first);
    assert_eq!(load.decode_blocks(), 4);
    drop(second);
    assert_eq!(load.decode_blocks(), 0);
}

#[test]
fn f4_output_blocks_count_less_towards_the_expected_end() {
    let load = Arc::new(new_load());
    let mut booking = Booking::new(
        load.clone(),
        &BookingRequest { expected_output_tokens: Some(32), ..request(16, &[1], true) },
    );
    assert!(booking.output_tokens(1));
    // F4.3
    assert!(!booking.output_tokens(16));
    // Block 2 began at token 1 and counts 1 - 1/32; block 3 began at token 17 and counts 1 - 17/32.
    assert!(booking.output_tokens(17));
    // F4.4
    assert_eq!(load.position.cell().unnamed_millis.load(Ordering::Relaxed), 969 + 469);
    assert!(booking.output_tokens(400));
    assert_eq!(
        load.position.cell().unnamed_millis.load(Ordering::Relaxed),
        969 + 469,
        "beyond the expected end nothing is added"
    );
}

#[test]
fn f4_without_expected_output_only_the_prompt_s_block_counts() {
    let load = Arc::new(new_load());
    let expects = |tokens| BookingRequest { expected_output_tokens: tokens, ..request(16, &[1], true) };
    let mut none = Booking::new(load.clone(), &expects(Some(0)));
    for osl in 1..=64 {
        none.output_tokens(osl);
    }
    // F4.4
    assert_eq!(load.decode_blocks(), 1);
    drop(none);
    let mut unknown = Booking::new(load.clone(), &expects(None));
    for osl in 1..=64 {
        unknown.output_tokens(osl);
    }
    assert_eq!(load.decode_blocks(), 5);
}

#[test]
fn f4_fewer_output_tokens_than_counted_release_blocks() {
    let load = Arc::new(new_load());
    let mut booking = Booking::new(load.clone(), &request(16, &[1], true));
    assert!(booking.output_tokens(40));
    assert_eq!(load.decode_blocks(), 4);
    assert!(!booking.output_tokens(17));
    assert_eq!(load.decode_blocks(), 3);
    assert!(!booking.output_tokens(0));
    assert_eq!(load.decode_blocks(), 1, "the prompt's block stays");
    assert!(booking.output_tokens(1));
    drop(booking);
    assert_eq!(load.decode_blocks(), 0);
}

proptest! {
    #[test]
    fn invariant_8_any_interleaving_ends_at_zero(
        steps in proptest::collection::vec((0_u8..5, 0_usize..6, 1_u32..200), 1..80),
    ) {
        let load = Arc::new(new_load());
        let mut bookings: Vec<Booking> = Vec::new();
        for (step, place, amount) in steps {
            let place = place.min(bookings.len().saturating_sub(1));
            match step {
                0 => {
                    let blocks: Vec<u64> = (0..u64::from(amount / 16)).collect();
                    bookings.push(Booking::new(load.clone(), &request(amount, &blocks, amount % 2 == 0)));
                }
                1 => if let Some(booking) = bookings.get_mut(place) { booking.prefill_done(); },
                2 => if let Some(booking) = bookings.get_mut(place) { booking.output_tokens(amount); },
                3 => if let Some(booking) = bookings.get_mut(place) {
                    prop_assert_eq!(booking.is_booked(), booking.handle().release());
                },
                _ => if !bookings.is_empty() { drop(bookings.remove(place)); },
            }
            let booked = bookings.iter().filter(|booking| booking.is_booked()).count();
            prop_assert_eq!(load.active_requests() as usize, booked);
        }
        bookings.clear();
        prop_assert_eq!(state(&load), (0, 0, 0));
        prop_assert_eq!(load.blocks.lock().own(), 0);
    }
}
