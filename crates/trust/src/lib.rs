//! Who is who: certificates, keys and TLS configurations.
