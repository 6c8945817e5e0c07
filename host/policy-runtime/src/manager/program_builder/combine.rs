//! Combines the outcomes of parts: all values, or the refusals of all parts.

use super::{super::plan::Refused, BuildError};

/// Returns all values, or all refusals.
pub(super) fn gather<T>(results: impl Iterator<Item = Result<T, Refused>>) -> Result<Vec<T>, Refused> {
    let (mut values, mut refused) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(value) => values.push(value),
            Err(error) => refused.push(error),
        }
    }
    let mut refused = refused.into_iter();
    refused.next().map_or(Ok(values), |first| Err(first.and(refused)))
}

/// Returns all loaded parts, or all refusals once no part is being compiled any more.
pub(super) fn gather_parts<T>(
    results: impl Iterator<Item = Result<T, BuildError>>,
) -> Result<Vec<T>, BuildError> {
    let start = Ok(Vec::new());
    results.fold(start, |values, result| {
        let (mut values, value) = both(values, result)?;
        values.push(value);
        Ok(values)
    })
}

/// Returns both values, or the refusals of both; a part that is being compiled may be refused, too.
pub(super) fn both<A, B>(a: Result<A, BuildError>, b: Result<B, BuildError>) -> Result<(A, B), BuildError> {
    match (a, b) {
        (Ok(a), Ok(b)) => Ok((a, b)),
        (Err(BuildError::Pending), _) | (_, Err(BuildError::Pending)) => Err(BuildError::Pending),
        (Err(BuildError::Refused(a)), Err(BuildError::Refused(b))) => Err(a.and([b]).into()),
        (Err(refused), Ok(_)) | (Ok(_), Err(refused)) => Err(refused),
    }
}
