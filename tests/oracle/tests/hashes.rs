//! Compares our block hashes with the oracle's (H1).

use dynamo_kv_router::protocols::{
    BlockExtraInfo, BlockHashOptions, BlockMmObjectInfo, compute_block_hash_for_seq,
    compute_seq_hash_for_block,
};
use prefix_index::{Prefix, Salt};
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::StdRng};

struct Case {
    tokens: Vec<u32>,
    block_size: usize,
    lora: Option<String>,
    salt: Option<String>,
    objects: Vec<Vec<u64>>,
}

/// Returns a string of up to 300 bytes, possibly empty. xxh3 has different code below 16, 128 and 240 bytes,
/// and above.
fn word(random: &mut StdRng) -> Option<String> {
    let most = if random.random_bool(0.1) { 300 } else { 24 };
    let len = random.random_range(0..most);
    let given = random.random_bool(0.5);
    given.then(|| (0..len).map(|_| char::from(random.random_range(b' '..=b'~'))).collect())
}

fn case(random: &mut StdRng) -> Case {
    let block_size = random.random_range(1..=128);
    let len = random.random_range(0..=6 * block_size);
    let blocks = len / block_size;
    let with_objects = random.random_bool(0.4);
    let mut objects = |_| {
        let count = if with_objects && random.random_bool(0.5) { random.random_range(0..4) } else { 0 };
        (0..count).map(|_| random.next_u64()).collect::<Vec<_>>()
    };
    let objects = (0..if with_objects { blocks } else { 0 }).map(&mut objects).collect();
    let tokens = (0..len).map(|_| random.next_u32()).collect();
    Case { tokens, block_size, lora: word(random), salt: word(random), objects }
}

#[test]
fn h1_ten_thousand_prompts_have_the_oracles_hashes() {
    let mut random = StdRng::seed_from_u64(1337);
    let (mut blocks, mut salted, mut with_objects) = (0, 0, 0);
    for number in 0..10_000 {
        let case = case(&mut random);
        let infos: Vec<Option<BlockExtraInfo>> = case.objects.iter().map(|objects| info(objects)).collect();
        let options = BlockHashOptions {
            block_mm_infos: (!infos.is_empty()).then_some(&infos),
            lora_name: case.lora.as_deref(),
            cache_namespace: case.salt.as_deref(),
            is_eagle: None,
        };
        let local = compute_block_hash_for_seq(&case.tokens, case.block_size as u32, options);
        let sequence = compute_seq_hash_for_block(&local);

        let salt = Salt { lora: case.lora.as_deref(), cache: case.salt.as_deref() };
        let of = |tokens: &[u32], objects: &[Vec<u64>]| -> Vec<u64> {
            let prefix = Prefix::of_tokens(tokens, case.block_size, &salt, objects);
            prefix.hashes().iter().map(|hash| hash.0).collect()
        };
        assert_eq!(of(&case.tokens, &case.objects), sequence, "sequence hashes of case {number}");
        // A block's local hash equals the sequence hash of a prompt that consists of this block.
        for (place, (block, expected)) in case.tokens.chunks_exact(case.block_size).zip(&local).enumerate() {
            let objects = case.objects.get(place..=place).unwrap_or_default();
            assert_eq!(of(block, objects), [expected.0], "local hash {place} of case {number}");
        }
        blocks += local.len();
        salted += usize::from(case.lora.is_some() || case.salt.is_some());
        with_objects += usize::from(infos.iter().any(Option::is_some));
    }
    assert!(blocks > 20_000 && salted > 5_000 && with_objects > 2_000, "{blocks} {salted} {with_objects}");
}

fn info(objects: &[u64]) -> Option<BlockExtraInfo> {
    let object = |mm_hash: &u64| BlockMmObjectInfo { mm_hash: *mm_hash, offsets: Vec::new() };
    (!objects.is_empty()).then(|| BlockExtraInfo { mm_objects: objects.iter().map(object).collect() })
}
