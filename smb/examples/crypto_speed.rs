//! GB/s of signing and sealing on one core: `cargo run --release -p forebay-smb --example crypto_speed`.
//!
//! A message is what a READ response looks like to the server: 80 bytes of headers and the payload apart.

use std::hint::black_box;
use std::time::{Duration, Instant};

use forebay_smb::crypto::{
    Cipher, CipherKey, NonceSequence, SealingKey, SessionKey, SigningAlgorithm, SigningKey,
};

const PAYLOAD_BYTES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];

fn main() {
    for bytes in PAYLOAD_BYTES {
        let mut payload = vec![0x5A; bytes];
        let header = [0x11; 80];
        for algorithm in [SigningAlgorithm::HmacSha256, SigningAlgorithm::AesCmac, SigningAlgorithm::AesGmac]
        {
            let key = SigningKey::new(algorithm, &SessionKey::new(&[7; 16]));
            report(bytes, &format!("{algorithm:?}"), || {
                black_box(key.sign(&[black_box(&header), black_box(&payload)]));
            });
        }
        for cipher in [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::Aes128Ccm, Cipher::Aes256Ccm] {
            let key =
                CipherKey::new(cipher, &[7; 32][..cipher.key_len()]).expect("the length is the cipher's");
            let key = SealingKey::new(&key);
            let mut nonces = NonceSequence::new([0; 3], 0);
            report(bytes, &format!("{cipher:?}"), || {
                let nonce = nonces.next_nonce().expect("2^64 are enough");
                black_box(key.seal_in_place(nonce, 1, black_box(&mut payload)).expect("the length fits"));
            });
        }
    }
}

fn report(bytes: usize, what: &str, mut once: impl FnMut()) {
    const ROUND: Duration = Duration::from_millis(60);
    // The best of several rounds: a shared machine only ever takes time away.
    let best = (0..7)
        .map(|_| {
            let (start, mut count) = (Instant::now(), 0u32);
            while start.elapsed() < ROUND {
                for _ in 0..8 {
                    once();
                }
                count += 8;
            }
            start.elapsed().as_secs_f64() / f64::from(count)
        })
        .fold(f64::INFINITY, f64::min);
    println!("{:>5} KiB  {what:<10}  {:6.2} GB/s", bytes >> 10, bytes as f64 / best / 1e9);
}
