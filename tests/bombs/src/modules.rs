//! Core modules that are expensive to compile or to instantiate.

use crate::encode::{MODULE, core_section, leb};

const TYPE: u8 = 1;
const FUNCTION: u8 = 3;
const TABLE: u8 = 4;
const MEMORY: u8 = 5;
const CODE: u8 = 10;

/// A module of one function without parameters.
fn function(locals: u32, code: &[u8]) -> Vec<u8> {
    let declared = match locals {
        0 => vec![0],
        // One group of i32.
        locals => [&[1][..], &leb(u64::from(locals)), &[0x7f]].concat(),
    };
    let body = [&declared[..], code, &[0x0b]].concat();
    let content = [&[1][..], &leb(body.len() as u64), &body].concat();
    let parts = [core_section(TYPE, &[1, 0x60, 0, 0]), core_section(FUNCTION, &[1, 0])];
    [MODULE.to_vec(), parts.concat(), core_section(CODE, &content)].concat()
}

/// A function of about `bytes` bytes that copies between `locals` variables in many small loops.
#[must_use]
pub fn many_locals(locals: u32, bytes: usize) -> Vec<u8> {
    let mut code = Vec::with_capacity(bytes + 16);
    let mut local = 0_u32;
    while code.len() < bytes {
        code.extend([0x03, 0x40, 0x20]);
        code.extend(leb(u64::from(local)));
        code.push(0x21);
        local = (local + 7_919) % locals.max(1);
        code.extend(leb(u64::from(local)));
        // Back to the loop's begin while the variable is not zero.
        code.push(0x20);
        code.extend(leb(u64::from(local)));
        code.extend([0x0d, 0, 0x0b]);
    }
    function(locals, &code)
}

/// A function of about `bytes` bytes: one long expression without variables.
#[must_use]
pub fn large_function(bytes: usize) -> Vec<u8> {
    let mut code = vec![0x41, 1];
    while code.len() < bytes {
        // Adds a constant and multiplies by another.
        code.extend([0x41, 3, 0x6a, 0x41, 5, 0x6c]);
    }
    code.push(0x1a);
    function(0, &code)
}

/// Loops in loops.
#[must_use]
pub fn nested_loops(depth: usize) -> Vec<u8> {
    function(0, &nested(0x03, depth))
}

/// Blocks in blocks, as compilers write a `switch`.
#[must_use]
pub fn nested_blocks(depth: usize) -> Vec<u8> {
    function(0, &nested(0x02, depth))
}

fn nested(opcode: u8, depth: usize) -> Vec<u8> {
    let mut code = [opcode, 0x40].repeat(depth);
    code.extend(vec![0x0b; depth]);
    code
}

/// `count` memories of `pages` pages of 64 KiB each.
#[must_use]
pub fn memories(count: u32, pages: u32) -> Vec<u8> {
    let mut content = leb(u64::from(count));
    for _ in 0..count {
        content.push(0);
        content.extend(leb(u64::from(pages)));
    }
    [MODULE.to_vec(), core_section(MEMORY, &content)].concat()
}

/// `count` tables of `elements` function references each.
#[must_use]
pub fn many_tables(count: u32, elements: u32) -> Vec<u8> {
    let mut content = leb(u64::from(count));
    for _ in 0..count {
        content.extend([0x70, 0]);
        content.extend(leb(u64::from(elements)));
    }
    [MODULE.to_vec(), core_section(TABLE, &content)].concat()
}
