//! What texts and numbers may be, where their type does not say it: for the document.
//!
//! The server checks by parsing, and says more in its refusals; these patterns let others know beforehand. What depends on
//! another member (`max_vcpus` on `vcpus`) is not said here.

use schemars::{Schema, SchemaGenerator, json_schema};

const V4: &str = r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
/// Not all that is an IPv6 address: written out in full, or `::` with a little behind it. Others are taken, too.
const V6: &str =
    r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|::([0-9a-f]{1,4})?|[0-9a-f]{1,4}(:[0-9a-f]{1,4}){0,5}::([0-9a-f]{1,4})?";
const PORT: &str = r"(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9]?[0-9]{1,3})";

/// An IP address.
pub(crate) fn ip(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "ip", "pattern": format!("^({V4}|{V6})$"), "examples": ["192.0.2.1"]})
}

/// An IP address, or null.
pub(crate) fn ip_or_null(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [ip(generator), {"type": "null"}]})
}

/// IP addresses.
pub(crate) fn ips(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "items": ip(generator), "default": []})
}

/// An address and a port.
pub(crate) fn socket(_: &mut SchemaGenerator) -> Schema {
    let pattern = format!("^({V4}|\\[({V6})\\]):{PORT}$");
    json_schema!({"type": "string", "format": "socket-addr", "pattern": pattern, "examples": ["192.0.2.1:7410"]})
}

/// An address and a port, or null.
pub(crate) fn socket_or_null(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [socket(generator), {"type": "null"}]})
}

/// A size in whole blocks of 4 KiB, not nothing.
pub(crate) fn blocks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "uint64", "minimum": 4096, "maximum": u64::MAX, "multipleOf": 4096})
}

/// A limit of the link that leaves it alive, or null.
pub(crate) fn limit(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": ["integer", "null"], "format": "uint64", "minimum": 100_000, "maximum": u64::MAX})
}

/// A unicast MAC address, not zero.
pub(crate) fn mac(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "pattern": "^[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}$",
        "not": {"const": "00:00:00:00:00:00"},
        "examples": ["02:00:00:00:00:01"],
    })
}

/// An interface's MTU; 0 means 1500.
pub(crate) fn mtu(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "uint16", "default": 0, "anyOf": [{"const": 0}, {"minimum": 576, "maximum": 9216}]})
}

#[cfg(test)]
mod tests {
    use super::*;
    use schemars::generate::SchemaSettings;
    use std::net::{IpAddr, SocketAddr};

    /// Examples from each pattern's corners: what it takes has to be taken by the parser.
    #[test]
    fn what_the_examples_say_is_taken_by_the_parsers() {
        let mut generator = SchemaSettings::draft2020_12().into_generator();
        let example = |schema: Schema| schema.as_value()["examples"][0].as_str().unwrap().to_owned();
        example(ip(&mut generator)).parse::<IpAddr>().unwrap();
        example(socket(&mut generator)).parse::<SocketAddr>().unwrap();
        for good in ["::", "::1", "1::", "1:2:3:4:5:6::", "1:2:3:4:5:6:7:8", "a:b::c"] {
            good.parse::<IpAddr>().unwrap();
            format!("[{good}]:65535").parse::<SocketAddr>().unwrap();
        }
    }
}
