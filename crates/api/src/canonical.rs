//! A form of JSON in which two versions of Godwit write the same thing in the same bytes, so that they digest it alike.
//!
//! While hosts are upgraded one after the other, the controller signs the digest of a definition and a node of another version
//! has to come to the same one. A version that knows a new field writes it, if only to say that there is nothing; one that
//! does not know it leaves it out. So, of an object:
//!
//! - a field that says nothing (`null`, `false`, `0`, an empty text or list) is as one that is not there;
//! - fields stand in the order of their names, whichever order their type declares them in.
//!
//! What can go wrong: a field whose default is something else than nothing makes a difference between versions as soon as it is
//! added, and moves between them are refused. So a new field's default is nothing, and it is not serialised while it has that.
//! A field that says something always counts: a version that does not know it comes to another digest, and refuses
//! what it could not honour. Elements of lists count all, since where one stands has a meaning.

use serde_json::Value;
use std::collections::BTreeMap;

/// The canonical form of `value`.
#[must_use]
pub fn bytes(value: &Value) -> Vec<u8> {
    let mut out = vec![];
    write(value, &mut out);
    out
}

/// Whether a field with this value is as one that is not there.
fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(elements) => elements.is_empty(),
        // An object names something by being there: the variant of an enum, as a rule.
        Value::Bool(true) | Value::Object(_) => false,
    }
}

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Object(fields) => {
            let fields: BTreeMap<_, _> = fields.iter().filter(|(_, value)| !says_nothing(value)).collect();
            out.push(b'{');
            for (at, (name, value)) in fields.into_iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                scalar(&Value::String(name.clone()), out);
                out.push(b':');
                write(value, out);
            }
            out.push(b'}');
        }
        Value::Array(elements) => {
            out.push(b'[');
            for (at, element) in elements.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write(element, out);
            }
            out.push(b']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => scalar(value, out),
    }
}

fn scalar(value: &Value, out: &mut Vec<u8>) {
    serde_json::to_writer(out, value).expect("a scalar has a JSON form, and memory takes it");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::VmDefinition;
    use serde_json::json;

    fn form(value: &Value) -> String {
        String::from_utf8(bytes(value)).unwrap()
    }

    fn definition() -> Value {
        json!({
            "id": 7, "name": "web", "volumes": [3, 4],
            "spec": {
                "machine": "pc-q35-7.2", "cpu": "qemu64", "vcpus": 2, "max_vcpus": 4, "memory": 134_225_920, "accel": "tcg",
                "boot": {"kernel": {"kernel": "vmlinuz"}},
                "disks": [{"volume": "root", "size": 16_777_216}, {"volume": "data", "size": 8_388_608}],
                "nics": [{"mac": "02:00:00:00:00:01", "component": "lan"}],
            },
            "wires": [{"id": 1, "component": {"switch": {"bridge": "br0"}}}],
        })
    }

    fn digest(value: Value) -> [u8; 32] {
        serde_json::from_value::<VmDefinition>(value).unwrap().digest()
    }

    #[test]
    fn fields_that_say_nothing_and_their_order_make_no_difference_and_everything_else_does() {
        let old: Value = serde_json::from_str(r#"{"b": [0, ""], "a": {"kernel": {"name": "x"}}}"#).unwrap();
        for nothing in [json!(null), json!(false), json!(0), json!(""), json!([])] {
            let new = json!({"a": {"kernel": {"name": "x", "new": nothing}}, "b": [0, ""], "new": nothing});
            assert_eq!(form(&new), form(&old), "{nothing}");
        }
        for other in [
            json!({"a": {"kernel": {"name": "x"}}, "b": [0, ""], "new": true}),
            json!({"a": {"kernel": {"name": "x"}}, "b": [0, ""], "new": {}}),
            json!({"a": {"kernel": {"name": "x"}}, "b": [0]}),
            json!({"a": {"kernel": {"name": "x"}}, "b": ["", 0]}),
            json!({"a": {"kernel": {}}, "b": [0, ""]}),
            json!({"a": {"name": "x"}, "b": [0, ""]}),
            json!({"a": "{\"kernel\":{\"name\":\"x\"}}", "b": [0, ""]}),
        ] {
            assert_ne!(form(&other), form(&old));
        }
    }

    /// As it was when this test was written. If it fails, nodes of the version before this one refuse every move that a controller
    /// of this version orders, and the other way round: say so where upgrades are described, or do without.
    #[test]
    fn a_definition_has_the_digest_that_it_had_in_earlier_versions() {
        let known = "73657aed3bcf7ba870d206c7a3e4f802e121c33882735d20ad63a5f66ce235d4";
        assert_eq!(blake3::Hash::from(digest(definition())).to_hex().as_str(), known);
        // One that writes every field, as this version reads them, has it too.
        let read: VmDefinition = serde_json::from_value(definition()).unwrap();
        assert_eq!(blake3::Hash::from(digest(serde_json::to_value(&read).unwrap())).to_hex().as_str(), known);
    }

    #[test]
    fn a_definition_of_which_anything_but_the_number_of_cpus_is_another_has_another_digest() {
        /// Every value that is no list and no object, one after the other, replaced by another of its kind.
        fn altered(value: &Value) -> Vec<Value> {
            let within =
                |make: &dyn Fn(Value) -> Value, inner: &Value| altered(inner).into_iter().map(make).collect::<Vec<_>>();
            match value {
                Value::Object(fields) => fields
                    .iter()
                    .flat_map(|(name, inner)| {
                        let with = |inner: Value| {
                            let mut all = fields.clone();
                            all.insert(name.clone(), inner);
                            Value::Object(all)
                        };
                        within(&with, inner)
                    })
                    .collect(),
                Value::Array(elements) => (0..elements.len())
                    .flat_map(|at| {
                        let with = |inner: Value| {
                            let mut all = elements.clone();
                            all[at] = inner;
                            Value::Array(all)
                        };
                        within(&with, &elements[at])
                    })
                    .collect(),
                Value::String(text) if text == "tcg" => vec![json!("kvm")],
                Value::String(text) => vec![json!(format!("{text}0"))],
                Value::Number(number) => vec![json!(number.as_u64().unwrap() + 1)],
                Value::Null | Value::Bool(_) => vec![],
            }
        }
        let whole = definition();
        let others: Vec<_> = altered(&whole).into_iter().collect();
        assert!(others.len() > 15, "{}", others.len());
        for other in others {
            let only_cpus = other["spec"]["vcpus"] != whole["spec"]["vcpus"];
            assert_eq!(digest(other.clone()) == digest(whole.clone()), only_cpus, "{other:#}");
        }
        let mut more = definition();
        more["spec"]["devices"] = json!(["pvpanic"]);
        assert_ne!(digest(more), digest(whole));
    }
}
