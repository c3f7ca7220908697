//! What strangers and other nodes say to be believed: capabilities, tokens, and requests to be enrolled.
//!
//! The authority, its keys and what they signed are fixed, in `fixtures/`, so that the n-th input of a seed is always the same;
//! nothing else believes that authority. Whatever is read, nothing may be believed that it did not sign.

use crate::{MIB, Target};
use godwit_api::trust::Enrol;
use godwit_trust::{
    AccessToken, Authority, Capability, Credentials, EnrolmentToken, Identity, PeerCertificate, SignedCapability,
    Validity,
};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::LazyLock;

/// What was signed, in hexadecimal as it travels.
const SIGNED: &str = include_str!("../fixtures/capability.hex");
/// A host's request for its key.
const REQUEST: &str = include_str!("../fixtures/request.pem");
/// Names and contents of what authority and node keep.
const FILES: [(&str, &str); 5] = [
    ("ca/ca.pem", include_str!("../fixtures/ca.pem")),
    ("ca/ca-key.pem", include_str!("../fixtures/ca-key.pem")),
    ("node/ca.pem", include_str!("../fixtures/ca.pem")),
    ("node/cert.pem", include_str!("../fixtures/node-cert.pem")),
    ("node/key.pem", include_str!("../fixtures/node-key.pem")),
];

struct Fixtures {
    authority: Authority,
    node: Credentials,
    /// The only one that was ever signed.
    capability: Capability,
}

/// Files as they have to lie: nobody else reads them.
fn lay_out(folder: &Path) -> std::io::Result<()> {
    for (name, contents) in FILES {
        let path = folder.join(name);
        std::fs::DirBuilder::new().recursive(true).create(path.parent().unwrap_or(folder))?;
        let mut file = std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(path)?;
        file.write_all(contents.as_bytes())?;
    }
    Ok(())
}

static FIXTURES: LazyLock<Fixtures> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder for the fixtures");
    lay_out(folder.path()).expect("the fixtures can be written");
    let node = Credentials::load(&folder.path().join("node")).expect("the node's files are in order");
    let signed = SignedCapability::try_from(SIGNED.trim().to_owned()).expect("the capability is in order");
    Fixtures {
        authority: Authority::open(&folder.path().join("ca")).expect("the authority's files are in order"),
        capability: node.open(&signed).expect("the authority's controller signed it"),
        node,
    }
});

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let pairs = text.trim().as_bytes().chunks_exact(2);
    pairs.filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// Reads it as whoever is shown it; whether it was believed.
fn believed(text: String) -> bool {
    let Ok(signed) = SignedCapability::try_from(text.clone()) else { return false };
    assert_eq!(String::from(signed.clone()), text, "a capability is written as it was read");
    let Ok(capability) = FIXTURES.node.open(&signed) else { return false };
    assert_eq!(capability, FIXTURES.capability, "nobody signed this");
    true
}

/// A capability, as a node shows it to another one.
pub const CAPABILITY: Target = Target {
    name: "capability",
    corpus: || {
        LazyLock::force(&FIXTURES);
        let whole = from_hex(SIGNED);
        // The three pieces alone, too, so that what is broken is not always the first.
        let body = usize::from(whole[0]) << 8 | usize::from(whole[1]);
        let claims = [&[0xff, 0xff][..], &whole[2..], &[0x10; 8]].concat();
        vec![whole.clone(), SIGNED.trim().into(), whole[..2 + body].to_vec(), whole[2 + body..].to_vec(), claims]
    },
    run: |input| {
        believed(hex(input));
        if let Ok(text) = std::str::from_utf8(input) {
            believed(text.to_owned());
        }
    },
    // Its text is held a few times, four digits a byte; what it says of lengths counts for nothing.
    bound: |length| MIB + 16 * length,
};

/// As PEM has it, in lines.
fn armour(der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::from("-----BEGIN CERTIFICATE REQUEST-----\n");
    for line in der.chunks(48) {
        for three in line.chunks(3) {
            let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
            for digit in 0..4 {
                let value = (bits >> (18 - 6 * digit)) & 63;
                text.push(if digit <= three.len() { char::from(DIGITS[value as usize]) } else { '=' });
            }
        }
        text.push('\n');
    }
    text + "-----END CERTIFICATE REQUEST-----\n"
}

/// Out of its armour.
fn bare(pem: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let lines = pem.lines().filter(|line| !line.starts_with('-'));
    let digits: Vec<u8> = lines.flat_map(str::bytes).filter_map(digit).collect();
    let mut out = vec![];
    for four in digits.chunks(4) {
        let bits = four.iter().fold(0u32, |bits, digit| bits << 6 | u32::from(*digit)) << (6 * (4 - four.len()));
        out.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    out
}

/// Signs a request, if it is in order; the certificate is for whom the token names, whatever the request asked for.
fn signed(request: &str) -> bool {
    let identity = Identity::node("ohio").expect("a name");
    let Ok(pem) = FIXTURES.authority.sign(request, &identity, Validity::days(1)) else { return false };
    let pem = pem.replace("CERTIFICATE", "CERTIFICATE REQUEST");
    let read = PeerCertificate::read(&[bare(&pem).into()]).expect("what was signed can be read");
    assert_eq!(read.identity, identity, "it is somebody else's");
    true
}

/// What the controller is sent by a host that has a token, and what people type.
pub const ENROLMENT: Target = Target {
    name: "enrolment",
    corpus: || {
        LazyLock::force(&FIXTURES);
        let (authority, secret) = ("0123456789abcdef".repeat(2), "0123456789abcdef".repeat(4));
        let body = serde_json::json!({"name": "ohio", "secret": secret, "request": REQUEST});
        vec![
            bare(REQUEST),
            REQUEST.into(),
            body.to_string().into_bytes(),
            format!("gwe1.ohio.{authority}.{secret}").into_bytes(),
            format!("gwa1.ann.{authority}.{secret}").into_bytes(),
        ]
    },
    run: |input| {
        signed(&armour(input));
        if let Ok(text) = std::str::from_utf8(input) {
            read_text(text);
        }
    },
    // A request that is too long is refused before it is read; a body is held, and what it says once more.
    bound: |length| MIB + 32 * length,
};

/// Whether it was understood as anything.
fn read_text(text: &str) -> bool {
    let token = text.parse::<EnrolmentToken>().ok();
    if let Some(token) = &token {
        assert_eq!(token.reveal().parse::<EnrolmentToken>().ok().as_ref(), Some(token));
    }
    let access = text.parse::<AccessToken>().ok();
    if let Some(access) = &access {
        assert_eq!(access.reveal().parse::<AccessToken>().ok().as_ref(), Some(access));
    }
    let body = serde_json::from_str::<Enrol>(text).ok();
    let enrolled = body.as_ref().is_some_and(|body| signed(&body.request));
    token.is_some() || access.is_some() || enrolled || signed(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_trust::{KeyRequest, Role};
    use godwit_units::{Generation, Lineage, MoveId, VmId, VolumeId};
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn what_is_in_order_is_believed_and_signed_so_that_mutations_begin_near_the_truth() {
        let corpus = (CAPABILITY.corpus)();
        assert!(believed(hex(&corpus[0])) && believed(String::from_utf8(corpus[1].clone()).expect("a text")));
        assert!(corpus[2..].iter().all(|part| !believed(hex(part))));
        let corpus = (ENROLMENT.corpus)();
        assert!(signed(&armour(&corpus[0])));
        for text in &corpus[1..] {
            assert!(read_text(std::str::from_utf8(text).expect("a text")));
        }
    }

    #[test]
    fn one_bit_more_or_less_and_a_capability_is_not_believed() {
        let whole = from_hex(SIGNED);
        for bit in 0..whole.len() * 8 {
            let mut broken = whole.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(!believed(hex(&broken)), "bit {bit}");
        }
    }

    /// Makes the fixtures anew: `cargo test -p godwit-fuzz -- --ignored fixtures`.
    #[test]
    #[ignore = "writes into the repository"]
    fn fixtures() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
        let folder = tempfile::tempdir().expect("a folder");
        let authority = Authority::create(&folder.path().join("ca")).expect("an authority");
        let century = Validity::lasting(Duration::from_secs(100 * 365 * 86_400));
        let named = |role, name: &str| {
            let out = folder.path().join(name);
            let issued = authority.issue(&Identity::new(role, name).expect("a name"), century).expect("issued");
            issued.write(&out).expect("written");
            out
        };
        let (node, controller) = (named(Role::Node, "node"), named(Role::Controller, "controller"));
        let ca = folder.path().join("ca");
        for (from, to) in [
            (ca.join("ca.pem"), "ca.pem"),
            (ca.join("ca-key.pem"), "ca-key.pem"),
            (node.join("cert.pem"), "node-cert.pem"),
            (node.join("key.pem"), "node-key.pem"),
        ] {
            std::fs::copy(&from, here.join(to)).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
        }
        let capability = Capability {
            mv: MoveId(7),
            vm: VmId(3),
            lineage: Lineage(1),
            generation: Generation(2),
            from: Identity::node("ohio").expect("a name"),
            to: Identity::node("texas").expect("a name"),
            remote: [10, 0, 0, 2].into(),
            volumes: (1..=20).map(VolumeId).collect(),
            wires: vec![1, 9],
            definition: [7; 32],
            begins: UNIX_EPOCH + Duration::from_secs(1_800_000_000),
            ends: UNIX_EPOCH + Duration::from_secs(1_800_000_060),
        };
        let signed = Credentials::load(&controller).expect("credentials").grant(&capability).expect("granted");
        std::fs::write(here.join("capability.hex"), String::from(signed) + "\n").expect("written");
        let request = KeyRequest::new(&Identity::node("ohio").expect("a name")).expect("a key").request_pem;
        std::fs::write(here.join("request.pem"), request).expect("written");
    }
}
