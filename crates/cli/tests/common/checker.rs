//! A guest that proves by itself that no page of its memory was lost or came late: it writes some MiB in passes, and before it writes a word it looks
//! whether that is what the pass before has written. One that is not stops it, and is remembered. What it writes no codec makes smaller.

use std::os::unix::fs::FileExt;

/// Words with no pattern that a codec would find, from 1 MiB on; the number of passes at 0x7e00, and what was wrong at 0x7e04.
const PROGRAM: [u8; 162] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, // cli; ds = ss = 0; sp = 0x7c00
    0x66, 0x0f, 0x01, 0x16, 0x9c, 0x7c, //                         lgdtl gdtr
    0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0, //             protected mode
    0xbb, 0x08, 0x00, 0x8e, 0xdb, //                               ds = all memory
    0x24, 0xfe, 0x0f, 0x22, 0xc0, //                               and back
    0x66, 0x31, 0xed, //                                           pass = 0
    0x66, 0xbf, 0x00, 0x00, 0x10, 0x00, //                   pass: at = 1 MiB
    0x66, 0x85, 0xed, 0x74, 0x0e, //                         word: if pass > 0
    0x66, 0x89, 0xe9, 0x66, 0x49, 0xe8, 0x2e, 0x00, //                 eax = value(at, pass - 1)
    0x67, 0x66, 0x39, 0x07, 0x75, 0x20, //                             if [at] != eax: wrong
    0x66, 0x89, 0xe9, 0xe8, 0x22, 0x00, //                         eax = value(at, pass)
    0x67, 0x66, 0x89, 0x07, //                                     [at] = eax
    0x66, 0x83, 0xc7, 0x04, //                                     at += 4
    0x66, 0x81, 0xff, 0x00, 0x00, 0x90, 0x00, 0x75, 0xd6, //       if at < 9 MiB, or what END says: word
    0x66, 0x45, 0x66, 0x89, 0x2e, 0x00, 0x7e, 0xeb, 0xc7, //       [0x7e00] = ++pass; pass
    0x66, 0x89, 0x3e, 0x04, 0x7e, 0xf4, 0xeb, 0xfd, //      wrong: [0x7e04] = at; hlt
    0x66, 0x69, 0xc1, 0x35, 0xae, 0xb2, 0xc2, //            value: eax = ecx * 0xc2b2ae35
    0x66, 0x01, 0xf8, //                                           eax += edi
    0x66, 0x69, 0xc0, 0xb1, 0x79, 0x37, 0x9e, //                   eax *= 0x9e3779b1
    0x66, 0x89, 0xc2, 0x66, 0xc1, 0xea, 0x0f, 0x66, 0x31, 0xd0, // eax ^= eax >> 15
    0x66, 0x69, 0xc0, 0x6b, 0xca, 0xeb, 0x85, 0xc3, //             eax *= 0x85ebca6b; ret
    0x8d, 0x74, 0x00, //                                           (padding)
    0, 0, 0, 0, 0, 0, 0, 0, //                                gdt: nothing
    0xff, 0xff, 0x00, 0x00, 0x00, 0x92, 0xcf, 0x00, //             all memory
    0x0f, 0x00, 0x8c, 0x7c, 0x00, 0x00, //                   gdtr: 15, gdt
];
/// Where it says where what it writes ends: the upper half of the address.
const END: usize = 0x51;

/// The disk of such a guest, which writes so many MiB.
pub fn disk(mib: u8) -> Vec<u8> {
    let mut disk = vec![0; 1 << 20];
    disk[..PROGRAM.len()].copy_from_slice(&PROGRAM);
    disk[END] = (1 + mib) * 16;
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk
}

/// Passes that a QEMU's guest with so much memory has made, and what it has found wrong.
pub fn passes(pid: u32, memory: u64) -> Option<(u32, u32)> {
    let mut bytes = [0; 8];
    super::ram(pid, memory)?.read_exact_at(&mut bytes, 0x7e00).ok()?;
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    Some((word(0), word(4)))
}
