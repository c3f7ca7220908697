// A business that keeps all of its data in memory, after the manner of SPECjbb 2005: each thread is a warehouse with stock and customers, whose orders,
// payments, deliveries and enquiries make objects and let others go. All that customers have paid is all that warehouses have taken; the one that is not so ends
// the program. Says once a second how many transactions there were since it last did: `transactions: 123`.
//
// Warehouses THREADS ITEMS

import java.util.ArrayDeque;
import java.util.HashMap;
import java.util.Map;
import java.util.SplittableRandom;

public final class Warehouses {
    private static final int CUSTOMERS = 1000;
    private static final int ORDERS = 5000;

    private static final class Item {
        final String name;
        final byte[] data = new byte[160];
        int stock = 100;

        Item(int number, SplittableRandom random) {
            name = "item " + number;
            random.nextBytes(data);
        }
    }

    private static final class Customer {
        final String name;
        long paid;
        String last = "";

        Customer(int number) {
            name = "customer " + number;
        }
    }

    private record Line(Item item, int count, String note) {}

    private static final class Order {
        final Customer customer;
        final Line[] lines;
        boolean delivered;

        Order(Customer customer, Line[] lines) {
            this.customer = customer;
            this.lines = lines;
        }
    }

    private static final class Warehouse implements Runnable {
        final Map<Integer, Item> stock = new HashMap<>();
        final Customer[] customers = new Customer[CUSTOMERS];
        final ArrayDeque<Order> orders = new ArrayDeque<>();
        final SplittableRandom random;
        long taken;
        long transactions;

        Warehouse(int number, int items) {
            random = new SplittableRandom(number);
            for (int i = 0; i < items; i++) {
                stock.put(i, new Item(i, random));
            }
            for (int i = 0; i < CUSTOMERS; i++) {
                customers[i] = new Customer(i);
            }
        }

        private void transaction() {
            Customer customer = customers[random.nextInt(CUSTOMERS)];
            int what = random.nextInt(100);
            if (what < 43) {
                Line[] lines = new Line[5 + random.nextInt(11)];
                for (int i = 0; i < lines.length; i++) {
                    Item item = stock.get(random.nextInt(stock.size()));
                    int count = 1 + random.nextInt(10);
                    item.stock = item.stock < count ? item.stock + 91 : item.stock - count;
                    lines[i] = new Line(item, count, item.name + " x " + count + " for " + customer.name);
                }
                orders.add(new Order(customer, lines));
                if (orders.size() > ORDERS) {
                    orders.remove();
                }
            } else if (what < 86) {
                int amount = 1 + random.nextInt(5000);
                customer.paid += amount;
                taken += amount;
                customer.last = customer.name + " paid " + amount;
            } else if (what < 90) {
                for (Order order : orders) {
                    if (!order.delivered) {
                        order.delivered = true;
                        break;
                    }
                }
            } else {
                int low = 0;
                int looked = 0;
                for (Order order : orders) {
                    for (Line line : order.lines) {
                        low += line.item().stock < 15 ? 1 : 0;
                    }
                    if (++looked == 20) {
                        break;
                    }
                }
                customer.last = low + " items are low";
            }
            transactions++;
        }

        @Override
        public void run() {
            while (true) {
                synchronized (this) {
                    for (int i = 0; i < 50; i++) {
                        transaction();
                    }
                }
            }
        }

        synchronized long[] look() {
            long paid = 0;
            for (Customer customer : customers) {
                paid += customer.paid;
            }
            return new long[] {transactions, taken, paid};
        }
    }

    public static void main(String[] args) throws InterruptedException {
        int threads = Integer.parseInt(args[0]);
        int items = Integer.parseInt(args[1]);
        Warehouse[] warehouses = new Warehouse[threads];
        for (int i = 0; i < threads; i++) {
            warehouses[i] = new Warehouse(i, items);
            Thread thread = new Thread(warehouses[i]);
            thread.setDaemon(true);
            thread.start();
        }
        long told = 0;
        while (true) {
            Thread.sleep(1000);
            long sum = 0;
            for (Warehouse warehouse : warehouses) {
                long[] seen = warehouse.look();
                if (seen[1] != seen[2]) {
                    System.out.println("customers have paid " + seen[2] + ", and " + seen[1] + " were taken");
                    System.exit(1);
                }
                sum += seen[0];
            }
            System.out.println("transactions: " + (sum - told));
            told = sum;
        }
    }
}
