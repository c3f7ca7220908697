#!/usr/bin/perl
# Prints BYTES of structured records, the same every time: what a guest's
# databases and logs look like to a codec. Three kinds take turns in runs of
# about a megabyte (JSON orders, CSV samples, access log lines), so that pages
# near each other resemble each other, as they do in real files.
use strict;
use warnings;

my $left = shift // die "usage: records.pl BYTES\n";
srand(20110309);    # perl's own generator: equal on every machine

my @names = map { my $n = $_; join '', map { chr(97 + ($n * 7 + $_ * 11) % 26) } 1 .. 4 + $n % 7 } 1 .. 400;
my @paths = map { '/' . join '/', map { $names[rand @names] } 1 .. 1 + rand 4 } 1 .. 600;
my @states = qw(new paid packed shipped delivered returned);
my @agents = ('Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/115.0', 'curl/7.88.1',
    'Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/114.0');
my ($clock, $id) = (1686355200, 100000);

sub order {
    $clock += int rand 3;
    $id++;
    my $items = join ',', map {
        sprintf '{"sku":"%s-%04d","qty":%d,"price":%.2f}', $names[rand 40], rand 5000, 1 + rand 5, rand 300
    } 1 .. 1 + rand 3;
    return sprintf qq({"id":%d,"at":%d,"customer":"%s.%s","state":"%s","items":[%s]}\n),
        $id, $clock, $names[rand @names], $names[rand @names], $states[rand @states], $items;
}

sub sample {
    $clock++;
    return sprintf "%d,sensor-%03d,%.3f,%.3f,%d,OK\n", $clock, rand 200, 20 + rand 5, 1000 + rand 20, rand 65536;
}

sub access {
    $clock += int rand 2;
    return sprintf qq(10.%d.%d.%d - - [%d] "GET %s?id=%d HTTP/1.1" %d %d "-" "%s"\n),
        rand 4, rand 256, rand 256, $clock, $paths[rand @paths], rand 1e6, (200, 200, 200, 304, 404)[rand 5],
        rand 50000, $agents[rand @agents];
}

my @kinds = (\&order, \&sample, \&access);
for (my $turn = 0; $left > 0; $turn++) {
    my $run = '';
    my $make = $kinds[$turn % @kinds];
    $run .= $make->() while length $run < 1 << 20;
    $run = substr $run, 0, $left if length $run > $left;
    print $run or die "records.pl: cannot write: $!\n";
    $left -= length $run;
}
