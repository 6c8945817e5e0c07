//! A request whose worker is asleep or gone, and the rest of a stream that has to find its workers before it
//! goes on there.

pub(crate) mod asleep;
mod pause;
pub(crate) mod planned_move;
pub(crate) mod worker_wait;
