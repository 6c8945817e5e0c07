//! The load that a booking holds on its rank. It is released once: by the end of the booking, or earlier by a
//! handle. Only the begin, the end and a new block take the lock, not each token.

use std::{
    ops::Deref,
    sync::{Arc, Weak, atomic::Ordering},
};

use parking_lot::Mutex;
use prefix_index::Prefix;

use super::{BookingRequest, JournalEntry, LoadValues, MILLIS, RankLoad};

/// Load of one booking on its rank.
#[derive(Debug)]
pub(super) struct BookedLoad {
    pub(super) rank: Arc<RankLoad>,
    /// `None`: it is released.
    amounts: Mutex<Option<Amounts>>,
}

#[derive(Debug)]
struct Amounts {
    /// Blocks with a hash.
    blocks: Option<Prefix>,
    values: LoadValues,
    /// The load as other gateways see it.
    entry: Option<Arc<JournalEntry>>,
}

/// The load of a booking, in place until the first handle is made: a decision allocates nothing for it.
#[derive(Debug)]
pub(super) enum BookingLoad {
    Own(BookedLoad),
    Shared(Arc<BookedLoad>),
}

/// Releases the load of a booking that lives longer than its load may count.
#[derive(Debug)]
pub struct BookingHandle(Weak<BookedLoad>);

impl BookingHandle {
    /// Returns whether the load is booked.
    #[must_use]
    pub fn is_booked(&self) -> bool {
        self.0.upgrade().is_some_and(|booked| booked.is_booked())
    }

    /// Releases the load. Returns whether it was booked.
    pub fn release(&self) -> bool {
        self.0.upgrade().is_some_and(|booked| booked.release())
    }
}

impl BookingLoad {
    pub(super) fn handle(&mut self) -> BookingHandle {
        let shared = match self {
            Self::Own(own) => {
                let amounts = Mutex::new(own.amounts.get_mut().take());
                Arc::new(BookedLoad { rank: own.rank.clone(), amounts })
            }
            Self::Shared(shared) => shared.clone(),
        };
        let handle = BookingHandle(Arc::downgrade(&shared));
        *self = Self::Shared(shared);
        handle
    }
}

impl Deref for BookingLoad {
    type Target = BookedLoad;

    fn deref(&self) -> &BookedLoad {
        match self {
            Self::Own(own) => own,
            Self::Shared(shared) => shared,
        }
    }
}

impl BookedLoad {
    pub(super) fn new(rank: Arc<RankLoad>, request: &BookingRequest) -> Self {
        let prefill_tokens = if request.track_prefill_tokens { request.new_prefill_tokens } else { 0 };
        let cell = rank.position.cell();
        cell.requests.fetch_add(1, Ordering::Relaxed);
        rank.booked.fetch_add(1, Ordering::Relaxed);
        cell.prefill_tokens.fetch_add(prefill_tokens, Ordering::Relaxed);
        let (blocks, unnamed) = if request.assume_kv_reuse {
            rank.change_blocks(&request.prefix, |blocks| blocks.add_own(&request.prefix));
            let named = request.prefix.named_blocks();
            (Some(request.prefix.clone()), request.total_prompt_blocks.saturating_sub(named))
        } else {
            (None, request.total_prompt_blocks)
        };
        let unnamed_millis = i64::from(unnamed) * MILLIS;
        cell.unnamed_millis.fetch_add(unnamed_millis, Ordering::Relaxed);
        rank.position.count_change();
        let values = LoadValues { prefill_tokens, unnamed_millis };
        let entry = rank
            .journal
            .as_ref()
            .map(|journal| journal.add(&request.prefix, request.assume_kv_reuse, values));
        Self { rank, amounts: Mutex::new(Some(Amounts { blocks, values, entry })) }
    }

    pub(super) fn is_booked(&self) -> bool {
        self.amounts.lock().is_some()
    }

    /// Releases the prefill tokens.
    pub(super) fn release_prefill_tokens(&self) {
        let mut amounts = self.amounts.lock();
        let Some(amounts) = amounts.as_mut() else { return };
        let tokens = std::mem::take(&mut amounts.values.prefill_tokens);
        if tokens > 0 {
            self.rank.position.cell().prefill_tokens.fetch_sub(tokens, Ordering::Relaxed);
            self.changed(amounts);
        }
    }

    /// Adds thousandths of blocks without a hash. Returns whether the load is booked.
    pub(super) fn add_unnamed(&self, millis: i64) -> bool {
        let mut amounts = self.amounts.lock();
        let Some(amounts) = amounts.as_mut() else { return false };
        amounts.values.unnamed_millis += millis;
        self.rank.position.cell().unnamed_millis.fetch_add(millis, Ordering::Relaxed);
        self.changed(amounts);
        true
    }

    /// Tells decisions and other gateways that the values changed.
    fn changed(&self, amounts: &Amounts) {
        self.rank.position.count_change();
        if let (Some(entry), Some(journal)) = (&amounts.entry, &self.rank.journal) {
            journal.update(entry, amounts.values);
        }
    }

    /// Releases the load. Returns whether it was booked.
    pub(super) fn release(&self) -> bool {
        let Some(Amounts { blocks, values, entry }) = self.amounts.lock().take() else { return false };
        if let (Some(entry), Some(journal)) = (entry, &self.rank.journal) {
            journal.end(&entry);
        }
        if let Some(blocks) = blocks {
            self.rank.change_blocks(&blocks, |booked| booked.release_own(&blocks));
        }
        let cell = self.rank.position.cell();
        cell.prefill_tokens.fetch_sub(values.prefill_tokens, Ordering::Relaxed);
        cell.unnamed_millis.fetch_sub(values.unnamed_millis, Ordering::Relaxed);
        cell.requests.fetch_sub(1, Ordering::Release);
        self.rank.position.count_change();
        true
    }
}
