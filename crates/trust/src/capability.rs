//! What one node may do at another, signed by the controller.
//!
//! A certificate proves who a node is. It does not give it any VM: a node that was taken over has a good certificate. So a
//! node that asks another one for something has to show that the controller ordered it: this VM, as it is defined, from this
//! host to that one, in this move. The one who is asked checks the signature, compares the names with those in the
//! certificates of the session, and does nothing that is not in it.
//!
//! # For how long
//!
//! [`Capability::begins`] and [`Capability::ends`] bound the *beginning* of a move, not its end: within them the destination
//! must have been asked for a place. A hand-off that has begun has to end however long a cut lasts, and with the controller
//! gone: if a capability could run out between SEALED and GRANTED, the VM would be stopped on both sides, and nobody could
//! end that. What bounds it instead is that it names one owner of one lineage. When the VM has a later owner, everybody who
//! keeps the owner's number (the hand-off's records, a gateway's port) refuses the older one.
//!
//! For the same reason the controller's certificate has to have been good when the capability was signed, not when it is
//! shown. It must not be revoked at that time, though.
//!
//! # What can go wrong
//!
//! *A capability is used by another node.* It names both ends, and they are compared with certificates: it is no secret.
//!
//! *It is used again.* The same move from the same source: tickets are used once (`godwit_handoff`).
//!
//! *Bytes are read in two ways.* There is one encoding of each capability: numbers of fixed length, texts and lists with their
//! lengths before them, lists in rising order, nothing after the end. Everything is bounded before it is held.
//!
//! *A signature is taken for another.* The controller's key signs TLS handshakes, too; those begin with 64 spaces, and
//! capabilities with [`MAGIC`].

use crate::enrolment::hex;
use crate::error::utc;
use crate::{Identity, PeerError, Role, peer_identity};
use godwit_units::{Generation, Lineage, MoveId, VmId, VolumeId};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rustls::sign::CertifiedKey;
use rustls::{SignatureScheme, server::danger::ClientCertVerified};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thiserror::Error;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The first bytes of what is signed.
const MAGIC: &[u8] = b"godwit capability 1\n";

/// The longest signed capability, bytes: 2 KiB of names and numbers, a certificate of some 600 bytes, a signature of 72.
pub const MAX_CAPABILITY: usize = 8 << 10;

/// The most volumes, and the most wires, that one names: more than fit into a machine.
pub const MAX_THINGS: usize = 128;

/// What a move's nodes may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// The move.
    pub mv: MoveId,
    /// The VM that moves.
    pub vm: VmId,
    /// Its lineage.
    pub lineage: Lineage,
    /// The generation that the destination will own.
    pub generation: Generation,
    /// The node that it leaves.
    pub from: Identity,
    /// The node that it goes to.
    pub to: Identity,
    /// The destination's address for tunnels.
    pub remote: IpAddr,
    /// Its volumes, in rising order.
    pub volumes: Vec<VolumeId>,
    /// Its wires, in rising order.
    pub wires: Vec<u32>,
    /// BLAKE3 of its definition: a place is made for this VM, not for another one of the same number.
    pub definition: [u8; 32],
    /// The first moment at which the move may begin; to the second.
    pub begins: SystemTime,
    /// The last moment at which it may begin.
    pub ends: SystemTime,
}

/// A capability that is not believed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CapabilityError {
    /// The bytes are none.
    #[error("this is no capability: {0}; both nodes and the controller have to run the same version of godwit")]
    Form(&'static str),
    /// Whoever signed it may not.
    #[error("the capability is signed by {signer}, who is no controller")]
    Signer {
        /// Who.
        signer: Identity,
    },
    /// The signer's certificate is not good.
    #[error("the capability's signer is not believed: {0}")]
    Certificate(PeerError),
    /// The signature is not of these bytes.
    #[error("the capability's signature is wrong: it was altered, or made up")]
    Signature,
    /// It cannot be made.
    #[error("a capability cannot be signed: {0}")]
    Sign(String),
    /// It has not begun, or is over.
    #[error("the capability allows a beginning from {} until {}: compare the hosts' clocks, or order the move again", utc(*begins), utc(*ends))]
    Time {
        /// From when.
        begins: SystemTime,
        /// Until when.
        ends: SystemTime,
    },
    /// It is about something else.
    #[error("the capability is for {what} {allowed}, not {asked}")]
    Other {
        /// Of what kind.
        what: &'static str,
        /// What it allows.
        allowed: String,
        /// What was asked.
        asked: String,
    },
}

impl Capability {
    /// Whether a move may begin under it at `now`.
    ///
    /// # Errors
    /// [`CapabilityError::Time`].
    pub fn may_begin(&self, now: SystemTime) -> Result<(), CapabilityError> {
        if now < self.begins || now > self.ends {
            return Err(CapabilityError::Time { begins: self.begins, ends: self.ends });
        }
        Ok(())
    }

    /// Refuses what differs from what is allowed.
    ///
    /// # Errors
    /// [`CapabilityError::Other`].
    pub fn same<T: PartialEq + fmt::Debug>(what: &'static str, allowed: &T, asked: &T) -> Result<(), CapabilityError> {
        if allowed == asked {
            return Ok(());
        }
        Err(CapabilityError::Other { what, allowed: format!("{allowed:?}"), asked: format!("{asked:?}") })
    }

    fn encode(&self) -> Result<Vec<u8>, CapabilityError> {
        let mut out = MAGIC.to_vec();
        for number in [self.mv.0, self.vm.0, self.lineage.0, self.generation.0, secs(self.begins), secs(self.ends)] {
            out.extend(number.to_be_bytes());
        }
        for node in [&self.from, &self.to] {
            let name = node.name().as_bytes();
            out.push(u8::try_from(name.len()).map_err(|_| CapabilityError::Form("a name is too long"))?);
            out.extend(name);
        }
        match self.remote {
            IpAddr::V4(ip) => {
                out.push(4);
                out.extend(ip.octets());
            }
            IpAddr::V6(ip) => {
                out.push(6);
                out.extend(ip.octets());
            }
        }
        let volumes: Vec<u64> = self.volumes.iter().map(|v| v.0).collect();
        let wires: Vec<u64> = self.wires.iter().map(|w| u64::from(*w)).collect();
        for list in [&volumes, &wires] {
            if list.len() > MAX_THINGS || !list.is_sorted_by(|a, b| a < b) {
                return Err(CapabilityError::Form("its volumes or wires are too many, or not in rising order"));
            }
            out.push(u8::try_from(list.len()).map_err(|_| CapabilityError::Form("a list is too long"))?);
            list.iter().for_each(|n| out.extend(n.to_be_bytes()));
        }
        out.extend(self.definition);
        Ok(out)
    }

    fn decode(bytes: &[u8]) -> Result<Self, CapabilityError> {
        let mut reader = Reader(bytes);
        if reader.take(MAGIC.len())? != MAGIC {
            return Err(CapabilityError::Form("it does not begin as one"));
        }
        let [mv, vm, lineage, generation, begins, ends] = [(); 6].map(|()| reader.number());
        let node = |reader: &mut Reader<'_>| {
            let length = reader.byte()?;
            let name = std::str::from_utf8(reader.take(usize::from(length))?)
                .map_err(|_| CapabilityError::Form("a name is no text"))?;
            Identity::node(name).map_err(|_| CapabilityError::Form("a name is none"))
        };
        let (from, to) = (node(&mut reader)?, node(&mut reader)?);
        let remote = match reader.byte()? {
            4 => IpAddr::from(reader.array::<4>()?),
            6 => IpAddr::from(reader.array::<16>()?),
            _ => return Err(CapabilityError::Form("an address of no kind")),
        };
        let volumes = reader.list()?.into_iter().map(VolumeId).collect();
        let wires: Result<Vec<u32>, _> = reader.list()?.into_iter().map(u32::try_from).collect();
        let wires = wires.map_err(|_| CapabilityError::Form("a wire's number is too great"))?;
        let definition = reader.array()?;
        if !reader.0.is_empty() {
            return Err(CapabilityError::Form("something follows its end"));
        }
        Ok(Self {
            mv: MoveId(mv?),
            vm: VmId(vm?),
            lineage: Lineage(lineage?),
            generation: Generation(generation?),
            from,
            to,
            remote,
            volumes,
            wires,
            definition,
            begins: time(begins?)?,
            ends: time(ends?)?,
        })
    }
}

fn secs(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn time(secs: u64) -> Result<SystemTime, CapabilityError> {
    UNIX_EPOCH.checked_add(Duration::from_secs(secs)).ok_or(CapabilityError::Form("a time beyond all years"))
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], CapabilityError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(CapabilityError::Form("it is cut short"))?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CapabilityError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn byte(&mut self) -> Result<u8, CapabilityError> {
        Ok(self.array::<1>()?[0])
    }

    fn number(&mut self) -> Result<u64, CapabilityError> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    fn list(&mut self) -> Result<Vec<u64>, CapabilityError> {
        let count = usize::from(self.byte()?);
        if count > MAX_THINGS {
            return Err(CapabilityError::Form("it names too many things"));
        }
        let list: Vec<u64> = (0..count).map(|_| self.number()).collect::<Result<_, _>>()?;
        if list.is_sorted_by(|a, b| a < b) {
            Ok(list)
        } else {
            Err(CapabilityError::Form("a list is not in rising order"))
        }
    }

    fn piece(&mut self) -> Result<&'a [u8], CapabilityError> {
        let length = u16::from_be_bytes(self.array()?);
        self.take(usize::from(length))
    }
}

/// A capability with its signature and its signer's certificate, as hex. Read it with
/// [`Credentials::open`](crate::Credentials::open).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SignedCapability(Vec<u8>);

impl fmt::Debug for SignedCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SignedCapability({} bytes)", self.0.len())
    }
}

impl From<SignedCapability> for String {
    fn from(signed: SignedCapability) -> Self {
        hex(&signed.0)
    }
}

impl TryFrom<String> for SignedCapability {
    type Error = CapabilityError;
    fn try_from(text: String) -> Result<Self, CapabilityError> {
        if text.len() > 2 * MAX_CAPABILITY || !text.len().is_multiple_of(2) {
            return Err(CapabilityError::Form("it is too long, or cut short"));
        }
        let digit = |c: u8| match c {
            b'0'..=b'9' => Ok(c - b'0'),
            b'a'..=b'f' => Ok(c - b'a' + 10),
            _ => Err(CapabilityError::Form("it is not in hexadecimal")),
        };
        let pairs = text.as_bytes().chunks_exact(2);
        let bytes: Result<Vec<u8>, _> = pairs.map(|pair| Ok(digit(pair[0])? << 4 | digit(pair[1])?)).collect();
        Ok(Self(bytes?))
    }
}

impl SignedCapability {
    pub(crate) fn sign(capability: &Capability, key: &CertifiedKey) -> Result<Self, CapabilityError> {
        let body = capability.encode()?;
        let signer = key
            .key
            .choose_scheme(&[SignatureScheme::ECDSA_NISTP256_SHA256])
            .ok_or_else(|| CapabilityError::Sign("the key is not an ECDSA key on P-256".into()))?;
        let signature = signer.sign(&body).map_err(|e| CapabilityError::Sign(e.to_string()))?;
        let mut out = vec![];
        for piece in [&body[..], &key.cert[0], &signature] {
            let length = u16::try_from(piece.len()).map_err(|_| CapabilityError::Form("it is too long"))?;
            out.extend(length.to_be_bytes());
            out.extend(piece);
        }
        if out.len() > MAX_CAPABILITY {
            return Err(CapabilityError::Form("it is too long"));
        }
        Ok(Self(out))
    }

    pub(crate) fn open(
        &self,
        believe: impl FnOnce(&CertificateDer<'_>, SystemTime) -> Result<ClientCertVerified, rustls::Error>,
    ) -> Result<Capability, CapabilityError> {
        let mut reader = Reader(&self.0);
        let (body, certificate, signature) = (reader.piece()?, reader.piece()?, reader.piece()?);
        if !reader.0.is_empty() {
            return Err(CapabilityError::Form("something follows its end"));
        }
        let capability = Capability::decode(body)?;
        let certificate = CertificateDer::from(certificate);
        let signer = peer_identity(std::slice::from_ref(&certificate)).map_err(CapabilityError::Certificate)?;
        if signer.role() != Role::Controller {
            return Err(CapabilityError::Signer { signer });
        }
        believe(&certificate, capability.begins)
            .map_err(|e| CapabilityError::Certificate(PeerError::from_rustls(&e)))?;
        let unreadable = |_| CapabilityError::Form("its certificate cannot be read");
        let (_, parsed) = X509Certificate::from_der(&certificate).map_err(unreadable)?;
        let key = &parsed.public_key().subject_public_key.data;
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key)
            .verify(body, signature)
            .map_err(|_| CapabilityError::Signature)?;
        Ok(capability)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Authority, Credentials, Validity};
    use proptest::prelude::*;

    fn capability() -> Capability {
        let now = UNIX_EPOCH + Duration::from_secs(secs(SystemTime::now()));
        Capability {
            mv: MoveId(7),
            vm: VmId(3),
            lineage: Lineage(0),
            generation: Generation(2),
            from: Identity::node("a").unwrap(),
            to: Identity::node("b").unwrap(),
            remote: [10, 0, 0, 2].into(),
            volumes: vec![VolumeId(4), VolumeId(9)],
            wires: vec![1],
            definition: [7; 32],
            begins: now,
            ends: now + Duration::from_secs(60),
        }
    }

    fn credentials(authority: &Authority, role: Role, validity: Validity) -> Credentials {
        let dir = tempfile::tempdir().unwrap();
        authority.issue(&Identity::new(role, "x").unwrap(), validity).unwrap().write(dir.path()).unwrap();
        Credentials::load(dir.path()).unwrap()
    }

    #[test]
    fn only_a_controller_of_the_same_authority_gives_capabilities() {
        let dir = tempfile::tempdir().unwrap();
        let ours = Authority::create(&dir.path().join("ours")).unwrap();
        let theirs = Authority::create(&dir.path().join("theirs")).unwrap();
        let day = Validity::days(1);
        let node = credentials(&ours, Role::Node, day);
        let controller = credentials(&ours, Role::Controller, day);
        let good = controller.grant(&capability()).unwrap();
        assert_eq!(node.open(&good), Ok(capability()));
        for role in [Role::Node, Role::Client(Access::Admin)] {
            let forged = credentials(&ours, role, day).grant(&capability()).unwrap();
            assert!(matches!(node.open(&forged), Err(CapabilityError::Signer { .. })), "{role}");
        }
        let foreign = credentials(&theirs, Role::Controller, day).grant(&capability()).unwrap();
        assert_eq!(node.open(&foreign), Err(CapabilityError::Certificate(PeerError::WrongAuthority)));
        let now = SystemTime::now();
        node.revoke(node.revocations().revoke(controller.identity().clone(), now).unwrap()).unwrap();
        assert!(matches!(node.open(&good), Err(CapabilityError::Certificate(PeerError::Revoked { .. }))));
    }

    #[test]
    fn a_capability_lasts_longer_than_the_certificate_that_signed_it_and_begins_only_in_its_time() {
        let dir = tempfile::tempdir().unwrap();
        let ours = Authority::create(dir.path()).unwrap();
        let node = credentials(&ours, Role::Node, Validity::days(1));
        let controller = credentials(&ours, Role::Controller, Validity::lasting(Duration::from_secs(4)));
        let allowed = capability();
        let signed = controller.grant(&allowed).unwrap();
        let late = Capability { begins: SystemTime::now() + Duration::from_secs(60), ..capability() };
        let out_of_time = controller.grant(&late).unwrap();
        std::thread::sleep(Duration::from_millis(5100));
        assert_eq!(node.open(&signed), Ok(allowed));
        assert!(matches!(node.open(&out_of_time), Err(CapabilityError::Certificate(PeerError::Expired { .. }))));
        let c = capability();
        assert_eq!(c.may_begin(c.begins), Ok(()));
        assert!(c.may_begin(c.begins - Duration::from_secs(1)).is_err());
        assert!(c.may_begin(c.ends + Duration::from_secs(1)).is_err());
    }

    #[test]
    fn a_capability_of_which_any_byte_was_altered_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let ours = Authority::create(dir.path()).unwrap();
        let node = credentials(&ours, Role::Node, Validity::days(1));
        let good = credentials(&ours, Role::Controller, Validity::days(1)).grant(&capability()).unwrap();
        for i in 0..good.0.len() {
            let mut bad = good.clone();
            bad.0[i] ^= 1;
            assert!(node.open(&bad).is_err(), "byte {i}");
            bad.0.truncate(i);
            assert!(node.open(&bad).is_err(), "cut at {i}");
        }
        assert!(SignedCapability::try_from("00".repeat(MAX_CAPABILITY + 1)).is_err());
        let text = String::from(good.clone());
        assert_eq!(SignedCapability::try_from(text), Ok(good));
    }

    proptest! {
        #[test]
        fn bytes_that_are_a_capability_are_its_only_encoding(
            tail in proptest::collection::vec(any::<u8>(), 0..200),
            at in 0..130usize, with in any::<u8>(), altered in any::<bool>(),
        ) {
            let mut bytes = capability().encode().unwrap();
            if altered {
                if let Some(byte) = bytes.get_mut(at) { *byte = with; }
            } else {
                bytes.truncate(at);
                bytes.extend(tail);
            }
            if let Ok(read) = Capability::decode(&bytes) {
                prop_assert_eq!(read.encode().unwrap(), bytes);
            }
        }
    }
}
